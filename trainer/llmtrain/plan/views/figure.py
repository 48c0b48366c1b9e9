"""The memory of a run as a PNG image, drawn with matplotlib."""

from io import BytesIO
from itertools import product

from llmtrain_data import units
from matplotlib.figure import Figure

from llmtrain.plan.views.view import PlanView
from llmtrain.plan.views.view_tables import device_label

# Okabe and Ito's colors, and greys. Where there are more parts, they begin again, with lines.
_COLORS = ("#0072B2", "#56B4E9", "#009E73", "#7FCDB8", "#F0E442", "#E69F00", "#D55E00", "#CC79A7", "#555555", "#888888")
_LINES = ("", "///", "...")
_GIB = 2**30
_MOST_ROWS = 64


def memory_figure(view: PlanView) -> bytes:
    """Return `drawn_memory` as a PNG."""
    file = BytesIO()
    drawn_memory(view).savefig(file, format="png")
    return file.getvalue()


def drawn_memory(view: PlanView) -> Figure:
    """Draw the memory of each role as a bar of its parts, with the stated memory as a line."""
    rows = view.budget.rows[:_MOST_ROWS]
    figure = Figure(figsize=(9.0, 1.8 + 0.34 * len(rows)), dpi=130, facecolor="white", layout="constrained")
    axes = figure.subplots()
    ends = [0.0] * len(rows)
    names = [name for name in rows[0].device if any(row.device[name] for row in rows)]
    for (hatch, color), name in zip(product(_LINES, _COLORS), names, strict=False):
        sizes, label = [row.device[name] / _GIB for row in rows], device_label(view.plan, name)
        axes.barh(range(len(rows)), sizes, left=ends, height=0.8, color=color, hatch=hatch, label=label)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    if view.budget.limit is not None:
        axes.axvline(view.budget.limit / _GIB, color="black", lw=1, ls="--", label="accelerator.memory")
    axes.set_yticks(range(len(rows)), [f"rank {row.role.rank}, of {row.role.ranks} with equal memory" for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("GiB on each rank's device")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.set_title(f"{view.plan.name} on {units.count(view.plan.grid.world, 'rank')}", loc="left", fontsize=10)
    figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    return figure
