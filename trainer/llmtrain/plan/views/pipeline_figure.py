"""A pipeline's timeline as a PNG image, drawn with matplotlib."""

from io import BytesIO
from statistics import median_low

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from llmtrain.plan.pipeline.actions import Action, Kind
from llmtrain.plan.views.pipeline_drawing import COLORS
from llmtrain.plan.views.pipeline_view import PipelineView

_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "backward of the weights"}
# In inches: the width of a letter of an action's name, and the widest image that viewers open.
_LETTER, _WIDEST = 0.085, 60.0


def timeline_figure(view: PipelineView) -> bytes:
    """Draw a pipeline's timeline, one row for each rank, and return it as a PNG. An action of median length has room
    for its name."""
    timeline, schedule = view.timeline, view.schedule
    spans = [(rank, span) for rank, row in enumerate(timeline.ranks) for span in row if span.end > span.start]
    letters = max(len(str(span.action)) for _, span in spans)
    usual = median_low(span.end - span.start for _, span in spans)
    width = min(max(letters * _LETTER * timeline.makespan / usual, 8.0), _WIDEST)
    figure = Figure(figsize=(width, 1.4 + 0.36 * schedule.ranks), dpi=130, facecolor="white", layout="constrained")
    axes = figure.subplots()
    for color in {shade for shades in COLORS.values() for shade in shades}:
        for rank, row in enumerate(timeline.ranks):
            bars = [(span.start, span.end - span.start) for span in row if _color(span.action) == color]
            axes.broken_barh(bars, (rank - 0.45, 0.9), color=color, edgecolor="white", lw=0.6)
    for rank, span in spans:
        length, name = span.end - span.start, str(span.action)
        if length / timeline.makespan * (width - 1) >= len(name) * _LETTER * 0.9:
            axes.text(span.start + length / 2, rank, name, ha="center", va="center", fontsize=7, color="white")
    axes.set_xlim(0, timeline.makespan)
    axes.set_ylim(schedule.ranks - 0.5, -0.5)
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.set_xlabel(f"time ({view.unit})")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.set_title(
        f"{view.name}, {schedule.microbatches} microbatches, layers {' '.join(map(str, view.split))}: "
        f"ranks wait {timeline.bubble:.1%} of the time",
        loc="left",
        fontsize=10,
    )
    chunks, split = range(schedule.chunks), schedule.splits_backward
    handles = [
        Patch(color=color, label=_NAMES[kind] + (f", chunk {' '.join(map(str, same))}" if len(chunks) > 1 else ""))
        for kind, colors in COLORS.items()
        for color, same in zip(colors, (chunks[::2], chunks[1::2]), strict=True)
        if len(same) and (split or kind is not Kind.W)
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=8)
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _color(action: Action) -> str:
    return COLORS[action.kind][action.chunk % 2]
