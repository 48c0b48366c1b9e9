"""Plot the measurements: time and rate over message size, one row for each link."""

from collections.abc import Sequence
from io import BytesIO

from llmtrain_data import units
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from llmtrain.cluster.description import Cluster
from llmtrain.launch.measure.result import OPERATIONS, Measured
from llmtrain.launch.measure.show import name_of

# Okabe and Ito's colors, which color-blind readers can tell apart.
_COLORS = dict(zip(OPERATIONS, ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000"), strict=True))


def links_figure(found: Sequence[Measured], cluster: Cluster) -> bytes:
    """Return a PNG of every operation over every link."""
    figure = Figure(figsize=(11, 3.2 * len(found)), dpi=130, facecolor="white", layout="constrained")
    rows = figure.subplots(len(found), 2, squeeze=False)
    for measured, (times, rates) in zip(found, rows, strict=True):
        sharing, members = measured.link.sharing, len(measured.link.groups[0])
        for operation in dict.fromkeys(each.operation for each in measured.timings):
            own = [each for each in measured.timings if each.operation == operation]
            sizes, style = [each.size for each in own], {"color": _COLORS[operation], "label": operation, "ms": 3}
            times.plot(sizes, [each.seconds for each in own], "o-", **style)
            rates.plot(sizes, [each.sent(members) * sharing for each in own], "o-", **style)
        label = f"{units.rate(measured.bandwidth)} as measured"
        rates.axhline(measured.bandwidth, color="#5f6b7a", ls="--", lw=1.2, label=label)
        times.set_title(name_of(measured, cluster), loc="left", fontsize=10)
        for axes, quantity in ((times, units.seconds), (rates, units.rate)):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.size(value)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _, quantity=quantity: quantity(value)))
            axes.grid(color="#e3e6ea", lw=0.8)
            axes.spines[["top", "right"]].set_visible(False)
        times.set_ylabel("time")
        rates.set_ylabel("a card sends" if measured.link.tier in ("cluster", "all") else "a rank sends")
        rates.legend(fontsize=7)
    for axes in rows[-1]:
        axes.set_xlabel("size of a rank's buffer")
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
