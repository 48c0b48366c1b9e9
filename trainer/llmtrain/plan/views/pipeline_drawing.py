"""A pipeline's timeline as text, for a terminal or a file."""

from collections.abc import Iterator, Sequence
from statistics import median_low

from llmtrain_data import units
from llmtrain_data.output import Terminal, table
from rich.style import Style
from rich.text import Text

from llmtrain.plan.pipeline.actions import Kind
from llmtrain.plan.pipeline.timeline import Span
from llmtrain.plan.views.pipeline_view import PipelineView

# Okabe and Ito's colors and a lighter green; odd chunks have the lighter color of each pair.
COLORS = {Kind.F: ("#0072B2", "#56B4E9"), Kind.B: ("#D55E00", "#E69F00"), Kind.W: ("#009E73", "#7FCDB8")}
# Long timelines show their beginning and their end.
_WIDEST = 200
_FIRST_BANDS, _LAST_BANDS = 5, 2


def print_view(view: PipelineView, console: Terminal) -> None:
    """Print the timeline, one line for each rank, in several blocks if the console is too narrow; then the summary."""
    # A file has no width, but nobody can read a timeline in one line.
    for line in timeline_lines(view, min(console.width, _WIDEST)):
        console.print(line, no_wrap=True, overflow="crop")
    console.print(table((), summary(view)))


def summary(view: PipelineView) -> list[tuple[str, str]]:
    """Return the figures of a pipeline, as (name, text)."""
    schedule, timeline = view.schedule, view.timeline
    chunks = f", each with {schedule.chunks} stages" if schedule.chunks > 1 else ""
    ranks = units.count(schedule.ranks, "rank")
    activations = "microbatches" + (" of one stage" if schedule.chunks > 1 else "")
    step = units.seconds(timeline.makespan) if view.unit == "s" else f"{timeline.makespan:.4g} {view.unit}"
    found = [
        ("schedule", f"{view.name}, {ranks}{chunks}, {schedule.microbatches} microbatches"),
        ("split", f"{' '.join(map(str, view.split))} layers, in the order of the model"),
        ("bubble", f"{timeline.bubble:.1%} of the ranks' time, or {timeline.bubble_over_ideal:.1%} of their work"),
        (
            "activations",
            f"{' '.join(map(str, view.live))} by rank, in {activations}; the schedule's bound is "
            f"{' '.join(map(str, view.bound))}",
        ),
        ("step", f"{step}, {view.slowdown:.3f} times as long as if no rank waited"),
    ]
    more = (("warning", view.warning), ("links", view.links))
    return [*found, *((name, sentence) for name, sentence in more if sentence is not None)]


def timeline_lines(view: PipelineView, width: int) -> Iterator[Text]:
    """Yield the timeline in lines of at most `width` columns, as blocks with one line for each rank.

    Time is to scale. An action of median length has room for its name, and shorter ones may have no name.
    """
    names = [f"rank {rank} " for rank in range(view.schedule.ranks)]
    band_columns = max(width - len(names[-1]), 20)
    spans = [span for rank in view.timeline.ranks for span in rank if span.end > span.start]
    widest = max(len(str(span.action)) for span in spans) + 1
    scale = widest / median_low(span.end - span.start for span in spans)
    columns = round(view.timeline.makespan * scale)
    bands = -(-columns // band_columns)
    left_out = range(_FIRST_BANDS, bands - _LAST_BANDS)
    for band in (*range(min(bands, _FIRST_BANDS)), *range(max(bands - _LAST_BANDS, _FIRST_BANDS), bands)):
        start = band * band_columns
        if left_out and band == left_out.stop:
            yield Text(f"... from {left_out.start * band_columns / scale:.4g} to {start / scale:.4g} ...\n", "dim")
        for name, rank in zip(names, view.timeline.ranks, strict=True):
            line = Text(name.ljust(len(names[-1])), "bold")
            yield line.append_text(_row(rank, scale, start, min(start + band_columns, columns)))
        if bands > 1:
            yield Text("")


def _row(spans: Sequence[Span], scale: float, begin: int, stop: int) -> Text:
    """Return the columns from `begin` to `stop` of a rank's line."""
    row = Text()
    for span in spans:
        start, end = round(span.start * scale), round(span.end * scale)
        if end <= begin or start >= stop:
            continue
        row.append(" " * (max(start, begin) - begin - len(row)))
        name = str(span.action) if len(str(span.action)) <= end - start else ""
        color = COLORS[span.action.kind][span.action.chunk % 2]
        shown = name + "─" * (min(end, stop) - start - len(name))
        row.append(shown[max(begin - start, 0) : stop - start], Style(color="white", bgcolor=color))
    row.append(" " * (min(round(spans[-1].end * scale), stop) - begin - len(row)))
    return row
