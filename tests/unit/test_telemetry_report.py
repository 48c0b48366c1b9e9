"""The report: figures and one page from whatever a run has logged so far."""

import json
import math
import re
from io import BytesIO
from math import nan
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from llmtrain.errors import BadInputError
from llmtrain.telemetry.figures import loss_figure, memory_figure, rate_figure, waits_figure
from llmtrain.telemetry.report import _waits, write_report

NAMES = ["index.html", "loss.png", "memory.png", "rate.png"]
HOSTILE = "<script>alert('x')</script> & $name"


def step_row(step: int, **other: Any) -> dict[str, Any]:
    row = {
        "step": step,
        "tokens": 64 * step,
        "loss": 3 + math.exp(-step / 50),
        "tokens_per_s": 1000.0 + step % 7,
        "mfu": None,
        "mfu_measured": (1000.0 + step % 7) / 4000,
        "memory_bytes": {"rss": 3 * 2**30, "peak_rss": 4 * 2**30, "model_states": 2**28},
        "comm_bytes": {"data": {"all_reduce": 1536}},
        "skipped_steps": 0,
        "elapsed_s": 0.1 * step,
    }
    return {**row, **other}


def leave(folder: Path, rows: list[dict[str, Any]], run: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.resolved.yaml").write_text(f"name: {HOSTILE}\n")
    if run is not None:
        (folder / "run.json").write_text(json.dumps(run))
    return folder


def run_file(**other: Any) -> dict[str, Any]:
    model = {"family": "gpt2", "layers": 2, "hidden": 32, "heads": 2, "vocab": 50}
    keys = {
        "name": HOSTILE, "model": model, "parameters": 1_350_000, "steps": 500, "tokens_per_step": 64,
        "total_tokens": 32000, "world": 2, "device": "CPU, 1 threads", "precision": "fp32", "datasheet_peak": None,
        "measured_peak": 1e11, "unigram_entropy": 6.0, "decisions": [HOSTILE],
    }  # fmt: skip
    return {**keys, **other}


def evaluation(step: int, loss: float) -> dict[str, Any]:
    return {"event": "eval", "step": step, "split": "validation", "loss": loss, "perplexity": math.exp(loss)}


def test_report_of_a_run_in_progress(tmp_path: Path) -> None:
    rows = [evaluation(0, 9.0), *(step_row(step) for step in range(1, 200)), evaluation(199, 3.0)]
    folder = leave(tmp_path / "run", rows, run_file())
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 200, "lo')
    page = write_report(folder)
    assert sorted(path.name for path in (folder / "report").iterdir()) == NAMES
    text = page.read_text()
    for shown in (
        "in progress or interrupted after step 199 of 500",
        "3.0000",
        "0.500",
        "1.35M",
        "1.50 KiB",
        "4.00 GiB",
    ):
        assert shown in text


def test_no_share_of_a_peak_that_was_wrong_is_shown(tmp_path: Path) -> None:
    shown = "share of measured peak"
    sound = [step_row(1), step_row(2)]
    assert shown in write_report(leave(tmp_path, sound)).read_text()
    for wrong in ([*sound, step_row(3, mfu_measured=None)], [step_row(1, mfu_measured=1.75), *sound[1:]]):
        assert shown not in write_report(leave(tmp_path, wrong)).read_text()


def test_page_needs_nothing_else_and_trusts_nothing(tmp_path: Path) -> None:
    end = {"event": "end", "step": 3, "outcome": HOSTILE, "reason": HOSTILE}
    rows = [step_row(1), step_row(3, comm_bytes={HOSTILE: {HOSTILE: 5}}), {**evaluation(3, 2.0), "split": HOSTILE}, end]
    text = write_report(leave(tmp_path, rows, run_file()), tmp_path / "elsewhere").read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; $name") >= 7
    assert set(re.findall(r'(?:src|href)="([^"]{0,22})', text)) == {"data:image/png;base64,"}
    assert not re.search(r"https?://|url\(|@import", text)


def test_the_links_of_each_node_are_shown(tmp_path: Path) -> None:
    figures = {"average": 1_500_000, "p90": 12_500_000, "peak": 25_000_000_000}
    busiest = {"nic eth0": {"node": 1, **figures}}
    going_on = write_report(leave(tmp_path, [step_row(1), step_row(2, link_bytes_per_s=busiest)])).read_text()
    cells = ("nic eth0", "1.50 MB/s", "12.5 MB/s", "25.0 GB/s")
    assert f"<td>1</td>{''.join(f'<td>{cell}</td>' for cell in cells)}<td></td><td></td>" in going_on
    links = {"nic eth0": {"both": figures, "sent": {"average": 999}, "received": {"average": 5000}}, HOSTILE: 3}
    end = {"event": "end", "step": 2, "links": {"0": links, "1": links}}
    ended = write_report(leave(tmp_path, [end, step_row(1), step_row(2), end])).read_text()
    for node in (0, 1):
        row = (str(node), *cells, "999 B/s", "5.00 kB/s")
        assert ended.count("".join(f"<td>{cell}</td>" for cell in row)) == 1
    assert "Bandwidth of the links" not in write_report(leave(tmp_path, [step_row(1)])).read_text()


def test_volumes_and_the_host_link_are_shown(tmp_path: Path) -> None:
    offload = {
        "read_bytes": {"/scratch0": 2**30, "/scratch1": 2**20}, "written_bytes": {"/scratch0": 2**29, "/scratch1": 0},
        "wait_s": 2.5, "waits_s": {"/scratch0": 2.5, "/scratch1": 0.0},
        "to_host_bytes": 2**21, "to_device_bytes": 2**22, "gpu_wait_s": 0.75, "compute_wait_s": 1.5,
        "activations": {"read_bytes": {"host": 2**10}, "written_bytes": {"host": 2**11}, "wait_s": 0.0},
    }  # fmt: skip
    more = {**offload, "read_bytes": {"/scratch0": 3 * 2**30, "/scratch1": 2**20}}
    rows = [step_row(1, offload=offload), step_row(2, offload=more), step_row(3)]
    page = write_report(leave(tmp_path, rows)).read_text()
    for cells in (
        ("model states", "/scratch0", "2.00 GiB", "512 MiB", "2.5 s"),
        ("model states", "/scratch1", "1.00 MiB", "0 B", "0.0 s"),
        ("model states", "host link: to the device, to the host", "4.00 MiB", "2.00 MiB", "0.8 s"),
        ("model states", "optimizer steps", "", "", "1.5 s"),
        ("activations", "host", "1.00 KiB", "2.00 KiB", ""),
    ):
        assert "".join(f"<td>{cell}</td>" for cell in cells) in page
    assert page.count("data:image/png") == 4
    waits = {"/scratch0": 2.5, "host link": 0.75, "optimizer steps": 1.5}
    assert str(_waits(rows)) == str({f"{name}, model states": [wait, wait, nan] for name, wait in waits.items()})
    assert (tmp_path / "report" / "waits.png").exists()
    odd = step_row(1, offload={"read_bytes": 3, "waits_s": {HOSTILE: "x"}, "activations": [1]})
    assert _waits([odd]) == {}
    assert "Volumes and host link" not in write_report(leave(tmp_path, [odd])).read_text()


def pixels(picture: bytes) -> Any:
    return matplotlib.image.imread(BytesIO(picture), format="png")


def blue_rows(picture: bytes) -> Any:
    """Return the heights at which the curve's first part is drawn, as shares of the picture from its top."""
    image = pixels(picture)
    red, green, blue = image[..., 0], image[..., 1], image[..., 2]
    drawn = (red < 0.1) & (abs(green - 0.45) < 0.1) & (abs(blue - 0.7) < 0.1)
    return np.nonzero(drawn[60:, 120:500].any(axis=1))[0] / len(image)


def test_an_outlier_does_not_flatten_the_curve() -> None:
    rows = [step_row(step, loss=4.0 - step / 200) for step in range(1, 100)]
    plain = np.ptp(blue_rows(loss_figure(rows, [], None)))
    rows[50]["loss"] = 1e6
    spiked = np.ptp(blue_rows(loss_figure(rows, [], None)))
    assert plain > 0.2
    assert spiked > 0.1


@pytest.mark.parametrize(
    "rows",
    [
        [step_row(1)],
        [step_row(1, loss=None)],
        [step_row(step, loss=None if step % 3 else 2.0, tokens_per_s=None) for step in range(1, 200)],
        [step_row(step, loss=2.0) for step in range(1, 30)],
        [{"step": 1}, {"step": 2, "loss": "high", "memory_bytes": 5, "comm_bytes": [], "link_bytes_per_s": {"a": []}}],
        [step_row(1, tokens_per_s=0.0, memory_bytes={"rss": 0})],
    ],
    ids=["one", "none finite", "gaps", "constant", "malformed", "zeros"],
)
def test_odd_rows_are_drawn(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    write_report(leave(tmp_path, rows))
    waits = waits_figure(rows, {"/scratch": [0.5] * len(rows), "host link": [nan] * len(rows)})
    for picture in (loss_figure(rows, [], None), rate_figure(rows), memory_figure(rows), waits):
        assert pixels(picture).shape[:2] == (546, 1170)


@pytest.mark.parametrize("broken", ["", "[]", "{", '{"model": 3}', '{"name": "x", "steps": 5}'])
def test_a_broken_run_file_leaves_its_facts_out(tmp_path: Path, broken: str) -> None:
    leave(tmp_path, [step_row(1)])
    (tmp_path / "run.json").write_text(broken)
    assert "Loss" in write_report(tmp_path).read_text()


def test_folders_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="absent is not a folder; give the folder of a run"):
        write_report(tmp_path / "absent")
    with pytest.raises(BadInputError, match=r"holds no metrics.jsonl; give"):
        write_report(tmp_path)
    leave(tmp_path, [evaluation(0, 9.0)])
    with pytest.raises(BadInputError, match=r"metrics.jsonl has no logged step yet"):
        write_report(tmp_path)
    assert not (tmp_path / "report").exists()


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    leave(tmp_path, [step_row(1)])
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match=r"file cannot take the report .*--output"):
        write_report(tmp_path, tmp_path / "file")


def test_planned_beside_measured(tmp_path: Path) -> None:
    """From the end's row, or, before the end, from the run's file and the last step."""
    planned = {"memory_bytes": 5 * 2**30, "comm_bytes": {"data": {"all_reduce": 1536}, "weights": {"all_gather": 2048}}}
    folder = leave(tmp_path / "run", [step_row(1)], run_file(planned=planned))
    page = write_report(folder).read_text()
    assert "<tr><td>peak memory</td><td>5.00 GiB</td><td>4.00 GiB</td></tr>" in page
    assert "<tr><td>data all_reduce</td><td>1.50 KiB</td><td>1.50 KiB</td></tr>" in page
    assert "<tr><td>weights all_gather</td><td>2.00 KiB</td><td>-</td></tr>" in page
    measured = {"memory_bytes": 6 * 2**30, "comm_bytes": {"data": {"all_reduce": 1024}}}
    end = {"event": "end", "step": 1, "outcome": "finished", "planned": planned, "measured": measured}
    page = write_report(leave(tmp_path / "run", [step_row(1), end])).read_text()
    assert "<tr><td>peak memory</td><td>5.00 GiB</td><td>6.00 GiB</td></tr>" in page
    assert "<tr><td>data all_reduce</td><td>1.50 KiB</td><td>1.00 KiB</td></tr>" in page


@pytest.mark.parametrize("wrong", [None, 5, [], {"memory_bytes": "x", "comm_bytes": [1]}, {"comm_bytes": {"a": 5}}])
def test_wrong_plans_are_left_out(wrong: object, tmp_path: Path) -> None:
    end = {"event": "end", "step": 1, "outcome": "finished", "planned": wrong, "measured": wrong}
    for rows in ([step_row(1)], [step_row(1), end]):
        page = write_report(leave(tmp_path / "run", rows, run_file(planned=wrong))).read_text()
        assert ("Planned and measured" in page) == (len(rows) == 1)
