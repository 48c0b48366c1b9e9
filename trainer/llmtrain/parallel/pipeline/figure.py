"""A pipeline's timeline as a picture, drawn with matplotlib off screen."""

from io import BytesIO

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from llmtrain.parallel.pipeline.actions import Kind
from llmtrain.parallel.pipeline.draw import COLORS
from llmtrain.parallel.pipeline.show import PipelineView

_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "backward of the weights"}
# In inches; a letter of an action's name, and the widest picture that viewers still open.
_LETTER, _WIDEST = 0.075, 60.0


def timeline_figure(view: PipelineView) -> bytes:
    """Draw a pipeline's timeline, one row for each rank; returns a PNG. It is as wide as names need that are to fit
    into the shortest action."""
    timeline, schedule = view.timeline, view.schedule
    spans = [(rank, span) for rank, row in enumerate(timeline.ranks) for span in row if span.end > span.start]
    letters = max(len(str(span.action)) for _, span in spans)
    shortest = min(span.end - span.start for _, span in spans)
    width = min(max(letters * _LETTER * timeline.makespan / shortest, 8.0), _WIDEST)
    figure = Figure(figsize=(width, 1.4 + 0.36 * schedule.ranks), dpi=130, facecolor="white", layout="constrained")
    axes = figure.subplots()
    for rank, span in spans:
        length = span.end - span.start
        color = COLORS[span.action.kind][span.action.chunk % 2]
        axes.barh(rank, length, left=span.start, height=0.9, color=color, edgecolor="white", lw=0.6)
        if length / timeline.makespan * (width - 1) >= len(str(span.action)) * _LETTER * 0.9:
            place = (span.start + length / 2, rank)
            axes.annotate(str(span.action), place, ha="center", va="center", fontsize=7, color="white")
    axes.set_xlim(0, timeline.makespan)
    axes.set_ylim(schedule.ranks - 0.5, -0.5)
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.set_xlabel("time (forward passes of one layer)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.set_title(
        f"{view.name}, {schedule.microbatches} microbatches, layers {' '.join(map(str, view.split))}: "
        f"ranks wait {timeline.bubble:.1%} of the time",
        loc="left",
        fontsize=10,
    )
    used = [kind for kind in Kind if kind is not Kind.W or schedule.splits_backward]
    handles = [
        Patch(
            color=COLORS[kind][chunk],
            label=_NAMES[kind] + (f", {('first', 'second')[chunk]} piece" if pieces > 1 else ""),
        )
        for pieces in [min(schedule.chunks, 2)]
        for kind in used
        for chunk in range(pieces)
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=8)
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
