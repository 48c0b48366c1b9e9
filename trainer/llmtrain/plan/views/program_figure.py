"""A rank's program as a PNG image, drawn with matplotlib: a row for each lane. No torch in here."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from types import MappingProxyType

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from llmtrain.plan.program.in_order import COMPUTE, Bar, InOrder

# Okabe and Ito's colors.
_COLORS: Mapping[str, str] = MappingProxyType(
    {
        "forward": "#0072B2",
        "backward": "#D55E00",
        "backward of the weights": "#E69F00",
        "weights": "#56B4E9",
        "secondary": "#F0E442",
        "gradients": "#009E73",
        "replicas": "#7FCDB8",
        "update": "#CC79A7",
    }
)
# In inches: the width of an instruction, and the widest image that viewers open.
_POSITION, _WIDEST = 0.22, 30.0
_MOST_POSITIONS = int(_WIDEST / _POSITION)


def program_figure(ordered: InOrder) -> bytes:
    """Draw a rank's instructions in the order in which it issues them, and return it as a PNG. A long program shows its
    beginning."""
    every = ordered.bars()
    positions = max(bar.end for bar in every)
    bars = [bar for bar in every if bar.start < _MOST_POSITIONS]
    shown = max(bar.end for bar in bars)
    lanes = [COMPUTE, *sorted({bar.lane for bar in bars} - {COMPUTE})]
    width = max(shown * _POSITION + 3, 8.0)
    figure = Figure(figsize=(width, 1.6 + 0.4 * len(lanes)), dpi=100, facecolor="white", layout="constrained")
    axes = figure.subplots()
    _draw(axes, bars, lanes)
    axes.set_xlim(0, shown)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_xlabel("order of the instructions, not time")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    part = "" if shown == positions else f": the first {shown:,} of {positions:,} instructions"
    axes.set_title(f"{ordered.plan.name}, step of rank {ordered.rank}{part}", loc="left", fontsize=10)
    used = {bar.purpose for bar in bars}
    handles = [Patch(color=color, label=name) for name, color in _COLORS.items() if name in used]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=8)
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw(axes: Axes, bars: Sequence[Bar], lanes: Sequence[str]) -> None:
    for purpose, color in _COLORS.items():
        for row, lane in enumerate(lanes):
            spans = [(bar.start, bar.end - bar.start) for bar in bars if (bar.lane, bar.purpose) == (lane, purpose)]
            axes.broken_barh(spans, (row - 0.45, 0.9), color=color, edgecolor="white", lw=0.6)
    for bar in bars:
        # Long names, such as embedding, would cover their neighbours.
        if len(bar.text) <= 4 * (bar.end - bar.start):
            middle = (bar.start + bar.end) / 2
            axes.text(middle, lanes.index(bar.lane), bar.text, ha="center", va="center", fontsize=6)
