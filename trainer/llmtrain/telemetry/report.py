"""`llmtrain report`: loss, rate and memory of a run as figures and one self-contained page."""

from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from html import escape
from importlib.resources import files
from math import isfinite, nan
from pathlib import Path
from statistics import median
from string import Template
from typing import Any

from llmtrain_data import units
from llmtrain_data.output import printable
from llmtrain_data.untrusted import UnreadableError, read_bytes, reason

from llmtrain.errors import BadInputError
from llmtrain.telemetry.figures import loss_figure, memory_figure, number_at, peak_shares, rate_figure, waits_figure
from llmtrain.telemetry.metrics import Row, read_metrics
from llmtrain.telemetry.planned import measured_figures, planned_and_measured
from llmtrain.telemetry.run_file import facts, read_run_file
from llmtrain.yaml.file import LARGEST_BYTES
from llmtrain.yaml.near_folder import expect_run_folder


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Write `loss.png`, `rate.png`, `memory.png` and `index.html` of a run, finished or not; return the page's path.
    With offload, also `waits.png`.

    output: folder for the files; by default `report` in the run's folder. Raises BadInputError if the run has no logged
    step or the report cannot be written.
    """
    rows = _read(run_dir)
    run, folder = read_run_file(run_dir), output or run_dir / "report"
    steps = [row for row in rows if "event" not in row]
    evaluations = [row for row in rows if row.get("event") == "eval"]
    pictures = {
        "loss": loss_figure(steps, evaluations, _entropy(run)),
        "rate": rate_figure(steps),
        "memory": memory_figure(steps),
    }
    if waits := _waits(steps):
        pictures["waits"] = waits_figure(steps, waits)
    page = _page(run_dir, run, rows, pictures)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            (folder / f"{name}.png").write_bytes(picture)
        (folder / "index.html").write_text(page, encoding="utf-8")
    except OSError as error:
        raise BadInputError(
            f"{folder} cannot take the report ({error.strerror}); name a writable folder with --output"
        ) from None
    return folder / "index.html"


def _read(run_dir: Path) -> list[Row]:
    expect_run_folder(run_dir, "give the folder of a run (logging.dir/name)")
    path = run_dir / "metrics.jsonl"
    try:
        rows = read_metrics(path)
    except OSError as error:
        raise BadInputError(f"{path} cannot be read ({reason(error)}); check its permissions") from None
    if not path.exists():
        raise BadInputError(
            f"{run_dir} holds no metrics.jsonl; give the folder of a run (logging.dir/name) that has started"
        )
    if not any("event" not in row for row in rows):
        raise BadInputError(f"{path} has no logged step yet; try again once the run has logged one")
    return rows


def _entropy(run: Row) -> float | None:
    entropy = number_at(run, "unigram_entropy")
    return entropy if isfinite(entropy) else None


def _page(run_dir: Path, run: Row, rows: list[Row], pictures: dict[str, bytes]) -> str:
    steps = [row for row in rows if "event" not in row]
    evaluations = [row for row in rows if row.get("event") == "eval"]
    template = Template(files("llmtrain.telemetry").joinpath("report.html").read_text(encoding="utf-8"))
    sections = [
        _section("Run", _table(_facts(run, run_dir))),
        _section("Decided", _table(((), *((text,) for text in _decisions(run))))),
        _section("Evaluations", _table((("step", "split", "loss", "perplexity"), *map(_evaluation, evaluations)))),
        _section("Planned and measured", _table(_planned(run, rows))),
        _section("Bytes handed to collectives in the last logged step", _table(_communication(steps[-1]))),
        _section("Bandwidth of the links, both directions together", _table(_bandwidth(rows))),
        _section("Volumes and host link of the main rank, per step", _table(_volumes(steps))),
        _section("Recipe", _recipe(run_dir)),
    ]
    tiles = (
        f'<div class="tile"><span>{_shown(key)}</span><b>{_shown(value)}</b></div>'
        for key, value in _tiles(run, steps, evaluations)
    )
    images = {name: f"data:image/png;base64,{b64encode(data).decode()}" for name, data in pictures.items()}
    waits = images.pop("waits", None)
    drawn = f'<img alt="Waits of each step for offloaded states and activations" src="{waits}">'
    return template.substitute(
        name=_shown(run.get("name", run_dir.resolve().name)),
        status=_shown(_status(run, rows)),
        tiles="".join(tiles),
        sections="\n".join(sections),
        waits=f"<h2>Waits for offloaded states and activations</h2>\n{drawn}" if waits else "",
        **images,
    )


def _status(run: Row, rows: list[Row]) -> str:
    last = max((number_at(row, "step") for row in rows if isfinite(number_at(row, "step"))), default=0)
    of = f" of {run['steps']}" if "steps" in run else ""
    ends = [row for row in rows if row.get("event") == "end"]
    if not ends:
        return f"No end is logged: in progress or interrupted after step {last:.0f}{of}"
    reason = f": {ends[-1]['reason']}" if "reason" in ends[-1] else ""
    return f"{str(ends[-1].get('outcome', 'ended')).capitalize()} at step {last:.0f}{of}{reason}"


def _tiles(run: Row, steps: list[Row], evaluations: list[Row]) -> Iterable[tuple[str, str]]:
    """Yield (name, value) of the main numbers that are known."""
    validation = [number_at(row, "loss") for row in evaluations if row.get("split") == "validation"]
    last, reached = steps[-1], validation[-1] if validation else nan
    entropy, skipped = number_at(run, "unigram_entropy"), number_at(last, "skipped_steps")
    numbers: list[tuple[str, float, Callable[[float], str]]] = [
        ("validation loss", reached, "{:.4f}".format),
        ("validation / entropy", reached / entropy if entropy else nan, "{:.3f}".format),
        ("training loss", number_at(last, "loss"), "{:.4f}".format),
        ("tokens", number_at(last, "tokens"), units.number),
        ("time", number_at(last, "elapsed_s"), units.duration),
        ("tokens/s, median", _median([number_at(row, "tokens_per_s") for row in steps]), units.number),
        ("MFU, median", _median(peak_shares(steps, "mfu")), "{:.1%}".format),
        ("share of measured peak, median", _median(peak_shares(steps, "mfu_measured")), "{:.1%}".format),
        ("peak memory, main rank", _peak_memory(steps), units.size),
        ("skipped steps", skipped or nan, "{:.0f}".format),
    ]
    return ((name, shown(value)) for name, value, shown in numbers if isfinite(value))


def _median(values: list[float]) -> float:
    known = [value for value in values if isfinite(value)]
    return median(known) if known else nan


def _peak_memory(steps: list[Row]) -> float:
    """Return the bytes of the device's peak, or of the process's without a device; NaN if unknown."""
    for key in ("peak_allocated", "peak_rss"):
        values = [value for row in steps if isfinite(value := number_at(row, "memory_bytes", key))]
        if values:
            return max(values)
    return nan


def _facts(run: Row, run_dir: Path) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    # Another version's run.json may lack some keys.
    with suppress(LookupError):
        found.extend(facts(run))
    return [(), *found, ("folder", str(run_dir.resolve()))]


def _decisions(run: Row) -> list[str]:
    decisions = run.get("decisions")
    return [str(text) for text in decisions] if isinstance(decisions, list) else []


def _evaluation(row: Row) -> tuple[str, ...]:
    loss, perplexity = number_at(row, "loss"), number_at(row, "perplexity")
    return str(row.get("step")), str(row.get("split")), f"{loss:.4f}", units.number(perplexity)


def _planned(run: Row, rows: list[Row]) -> list[tuple[str, ...]]:
    """Return planned figures and those that the run has measured so far."""
    last = rows[-1]
    if "measured" in last:
        found = planned_and_measured(last.get("planned"), last["measured"])
    else:
        step = [row for row in rows if "event" not in row][-1]
        measured = measured_figures(
            step.get("memory_bytes"), step.get("comm_bytes"), offload=_mapping(step.get("offload"))
        )
        found = planned_and_measured(run.get("planned"), measured) if "planned" in run else iter(())
    return [("", "planned", "measured"), *found]


def _communication(row: Row) -> list[tuple[str, ...]]:
    groups = row.get("comm_bytes")
    found = [
        (str(group), str(op), units.size(count))
        for group, ops in (groups.items() if isinstance(groups, dict) else ())
        for op in (ops if isinstance(ops, dict) else ())
        if isfinite(count := number_at(ops, op))
    ]
    return [("group", "operation", "bytes"), *found]


def _bandwidth(rows: list[Row]) -> list[tuple[str, ...]]:
    """Return the rates of each node's links at the run's end, or of the busiest node's at the last step."""
    last = max(index for index, row in enumerate(rows) if "event" not in row)
    ended = [entry for row in rows[last:] for entry in _entries(row.get("links"))]
    found = [
        (node, link, *_rates(rates, "both"), _rates(rates, "sent")[0], _rates(rates, "received")[0])
        for node, links in ended
        for link, rates in _entries(links)
    ]
    if not ended:
        found = [
            (str(rates.get("node")), link, *_rates({"both": rates}, "both"), "", "")
            for link, rates in _entries(rows[last].get("link_bytes_per_s"))
        ]
    return [("node", "link", "average", "90th percentile", "peak", "sent, average", "received, average"), *found]


def _volumes(steps: list[Row]) -> list[tuple[str, ...]]:
    """Return what the logged steps moved on the mean between the device, the host and each volume, and how long it was
    waited for; and how long the computation waited for offloaded optimizer steps."""
    found: list[tuple[str, ...]] = []
    for what, key in (("model states", None), ("activations", "activations")):
        moved = [row for step in steps if (row := _offloaded(step, key))]
        paths = dict.fromkeys(path for row in moved for path in _mapping(row.get("read_bytes")))
        for path in paths:
            read, written, waited = (_mean(moved, name, path) for name in ("read_bytes", "written_bytes", "waits_s"))
            found.append((what, path, *_sizes(read, written), units.duration(waited) if isfinite(waited) else ""))
        link = _mean(moved, "to_device_bytes"), _mean(moved, "to_host_bytes")
        if any(map(isfinite, link)):
            waited = _mean(moved, "gpu_wait_s")
            duration = units.duration(waited) if isfinite(waited) else ""
            found.append((what, "host link: to the device, to the host", *_sizes(*link), duration))
        if isfinite(waited := _mean(moved, "compute_wait_s")):
            found.append((what, "optimizer steps", "", "", units.duration(waited)))
    return [("", "", "read", "written", "waited for"), *found]


def _waits(steps: list[Row]) -> dict[str, list[float]]:
    """Return the seconds for which each step waited for each volume, the host link and optimizer steps, without what no
    step waited for."""
    found: dict[str, list[float]] = {}
    for what, key in (("model states", None), ("activations", "activations")):
        moved = [_offloaded(step, key) for step in steps]
        places = [
            ("waits_s", path) for path in dict.fromkeys(path for row in moved for path in _mapping(row.get("waits_s")))
        ]
        for keys in (*places, ("gpu_wait_s",), ("compute_wait_s",)):
            name = {"gpu_wait_s": "host link", "compute_wait_s": "optimizer steps"}.get(keys[0], keys[-1])
            found[f"{name}, {what}"] = [number_at(row, *keys) for row in moved]
    return {name: waits for name, waits in found.items() if any(wait > 0 for wait in waits)}


def _offloaded(step: Row, key: str | None) -> Row:
    offload = _mapping(step.get("offload"))
    return offload if key is None else _mapping(offload.get(key))


def _mapping(value: Any) -> Row:
    return value if isinstance(value, dict) else {}


def _mean(rows: list[Row], *keys: str) -> float:
    known = [value for row in rows if isfinite(value := number_at(row, *keys))]
    return sum(known) / len(known) if known else nan


def _sizes(*values: float) -> list[str]:
    return [units.size(value) if isfinite(value) else "" for value in values]


def _entries(value: Any) -> list[tuple[str, Row]]:
    pairs = value.items() if isinstance(value, dict) else ()
    return [(str(key), item) for key, item in pairs if isinstance(item, dict)]


def _rates(row: Row, direction: str) -> list[str]:
    values = (number_at(row, direction, key) for key in ("average", "p90", "peak"))
    return [units.rate(value) if isfinite(value) else "" for value in values]


def _recipe(run_dir: Path) -> str:
    try:
        content = read_bytes(run_dir / "recipe.resolved.yaml", LARGEST_BYTES)
    except UnreadableError:
        return ""
    return f"<pre>{_shown(content.decode(errors='replace'))}</pre>"


def _shown(value: object) -> str:
    return escape(printable(value))


def _table(rows: Sequence[Sequence[Any]]) -> str:
    """Return an HTML table; the first row is its head (empty: none). Without other rows, returns an empty string."""
    if len(rows) < 2:
        return ""
    head = f"<tr>{''.join(f'<th>{_shown(cell)}</th>' for cell in rows[0])}</tr>" if rows[0] else ""
    body = "".join(f"<tr>{''.join(f'<td>{_shown(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    return f"<table>{head}{body}</table>"


def _section(title: str, body: str) -> str:
    return f'<h2>{_shown(title)}</h2>\n<div class="scroll">{body}</div>' if body else ""
