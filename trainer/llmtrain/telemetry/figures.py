"""The report's figures, drawn with matplotlib off screen."""

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from math import isfinite, nan
from typing import Any

import numpy as np
from llmtrain_data import units
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from llmtrain.telemetry.metrics import Row

# Colors that color-blind readers can tell apart: three of Okabe and Ito's, a red of Paul Tol's, and a gray.
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072B2", "#D55E00", "#009E73", "#CC3311", "#5f6b7a"
_MEMORY = {
    "peak_rss": ("resident, peak", _BLUE, "--"),
    "rss": ("resident", _BLUE, "-"),
    "reserved": ("reserved on the device", _GREEN, "--"),
    "peak_allocated": ("allocated on the device, peak", _ORANGE, "--"),
    "allocated": ("allocated on the device", _ORANGE, "-"),
    "model_states": ("model states", _GREY, ":"),
}
# A curve with this many points or more also gets a running median.
_SMOOTH_FROM = 120
_LARGEST = 1e100


def number_at(row: Row, *keys: str) -> float:
    """Return the number under nested keys of a row; NaN if there is none, or if it is too large to draw."""
    value: Any = row
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
    return float(value) if known else nan


def peak_shares(steps: Sequence[Row], key: str) -> list[float]:
    """Return the share of a peak that each logged step reached, `mfu` or `mfu_measured`; NaN if it has none.

    All are NaN if any step was faster than the peak, which was wrong then: rows have no share from that step on.
    """
    found = [number_at(row, key) for row in steps]
    sound = isfinite(found[-1]) and not any(share > 1 for share in found)
    return found if sound else [nan] * len(found)


def loss_figure(steps: list[Row], evaluations: list[Row], unigram_entropy: float | None) -> bytes:
    """Draw training and validation loss over steps, in nats per token; returns a PNG."""
    figure, axes = _figure("loss (nats per token)")
    x, loss = _column(steps, "step"), _column(steps, "loss")
    _curve(axes, x, loss, _BLUE, "training")
    validation = [row for row in evaluations if row.get("split") == "validation"]
    measured = _column(validation, "loss")
    if len(measured):
        axes.plot(_column(validation, "step"), measured, "o-", color=_ORANGE, ms=4, lw=1.5, label="validation")
    if unigram_entropy is not None:
        label = f"unigram entropy of the validation tokens ({unigram_entropy:.2f})"
        axes.axhline(unigram_entropy, color=_GREY, ls="--", lw=1.2, label=label)
    others = [*measured, *([] if unigram_entropy is None else [unigram_entropy])]
    _limit(axes, loss, others)
    skipped = x[~np.isfinite(loss)]
    if len(skipped):
        # Draw skipped steps along the lower edge, because they have no finite loss.
        at = axes.get_ylim()[0]
        axes.plot(skipped, [at] * len(skipped), "x", color=_RED, clip_on=False, label="not finite, skipped")
    return _png(figure, axes)


def rate_figure(steps: list[Row]) -> bytes:
    """Draw tokens per second over steps, with a utilisation axis if it is known; returns a PNG."""
    figure, axes = _figure("tokens per second")
    rate = _column(steps, "tokens_per_s")
    _curve(axes, _column(steps, "step"), rate, _GREEN, "all ranks together")
    _limit(axes, rate, [0.0])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    for key, label in (
        ("mfu", "MFU, of the data sheet's peak"),
        ("mfu_measured", "share of the measured peak"),
    ):
        per_token = _constant(np.array(peak_shares(steps, key)) / np.where(rate > 0, rate, nan))
        if per_token is not None:
            _percent_axis(axes, per_token, label)
            break
    return _png(figure, axes)


def memory_figure(steps: list[Row]) -> bytes:
    """Draw the main rank's memory over steps; returns a PNG."""
    figure, axes = _figure("memory of the main rank")
    x = _column(steps, "step")
    for key, (label, color, style) in _MEMORY.items():
        used = np.array([number_at(row, "memory_bytes", key) for row in steps])
        if np.isfinite(used).any():
            axes.plot(x, used, color=color, ls=style, lw=1.6, label=label, marker="o" if len(x) == 1 else None)
    axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.05)
    axes.yaxis.set_major_locator(_BinaryLocator(nbins=6, steps=[1, 2, 4, 5, 8, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.size(value)))
    return _png(figure, axes)


def waits_figure(steps: list[Row], waits: Mapping[str, Sequence[float]]) -> bytes:
    """Draw for how long each logged step waited for each tier of memory; returns a PNG.

    waits: by name, in seconds, of each of `steps`; NaN where not known.
    """
    figure, axes = _figure("seconds of a step")
    colors = (_BLUE, _ORANGE, _GREEN, _RED, _GREY)
    for index, (name, seconds) in enumerate(waits.items()):
        _curve(axes, _column(steps, "step"), np.array(seconds), colors[index % len(colors)], name)
    axes.set_ylim(bottom=0)
    return _png(figure, axes)


class _BinaryLocator(MaxNLocator):
    """Puts ticks on round numbers of the axis's binary unit."""

    def tick_values(self, vmin: float, vmax: float) -> Any:
        unit = 2.0 ** (10 * int(np.log2(max(vmax, 1)) // 10))
        return np.asarray(super().tick_values(vmin / unit, vmax / unit)) * unit


def _column(rows: Sequence[Row], key: str) -> Any:
    return np.array([number_at(row, key) for row in rows], dtype=float)


def _figure(ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9, 4.2), dpi=130, facecolor="white", layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.grid(color="#e3e6ea", lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    return figure, axes


def _curve(axes: Axes, x: Any, y: Any, color: str, label: str) -> None:
    if len(x) < _SMOOTH_FROM:
        axes.plot(x, y, color=color, lw=1.6, marker="o" if len(x) < 3 else None, ms=4, label=label)
        return
    axes.plot(x, y, color=color, lw=0.8, alpha=0.35)
    axes.plot(*_smooth(x, y), color=color, lw=1.8, label=f"{label} (running median)")


def _smooth(x: Any, y: Any) -> tuple[Any, Any]:
    """Return at most 1000 points of the curve, each the median of a fiftieth of the curve around it."""
    half, centres = max(len(y) // 100, 2), np.linspace(0, len(y) - 1, min(len(y), 1000)).astype(int)
    windows = (y[max(0, i - half) : i + half + 1] for i in centres)
    medians = [np.median(w[np.isfinite(w)]) if np.isfinite(w).any() else nan for w in windows]
    return x[centres], np.array(medians)


def _limit(axes: Axes, y: Any, others: list[float]) -> None:
    """Fit the y axis to the curve without outliers that would flatten the rest, and annotate how many these are."""
    finite = y[np.isfinite(y)]
    always = [value for value in others if isfinite(value)]
    if not len(finite):
        return
    bottom, most = finite.min(), np.quantile(finite, 0.98)
    top = max([finite.max(), *always])
    usual = bottom + 1.5 * (most - bottom)
    if len(finite) >= 20 and finite.max() > usual:
        top = max([usual, *always])
    bottom = min([bottom, *always])
    margin = 0.05 * (top - bottom) or 0.05 * abs(top) or 1.0
    axes.set_ylim(bottom - margin, top + margin)
    above = int((finite > top + margin).sum())
    if above:
        text = f"{above} point{'s' if above > 1 else ''} above, up to {units.number(float(finite.max()))}"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
        axes.annotate(text, (0.01, 0.98), xycoords="axes fraction", va="top", fontsize=9, color=_GREY, bbox=box)


def _constant(ratio: Any) -> float | None:
    """Return the value of a column that is the same in all rows, within 1%; None if it varies or is missing."""
    finite = ratio[np.isfinite(ratio)]
    if not len(finite) or not finite.min() > 0 or finite.max() / finite.min() > 1.01:
        return None
    return float(np.median(finite))


def _percent_axis(axes: Axes, factor: float, label: str) -> None:
    scale: Callable[[Any], Any] = lambda value: value * factor * 100  # noqa: E731
    back: Callable[[Any], Any] = lambda value: value / factor / 100  # noqa: E731
    percent = axes.secondary_yaxis("right", functions=(scale, back))
    percent.set_ylabel(label)
    percent.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))


def _png(figure: Figure, axes: Axes) -> bytes:
    # A curve with one point has no width to fit the axis to.
    left, right = axes.get_xlim()
    if right - left < 2:
        middle = round((left + right) / 2)
        axes.set_xlim(middle - 1, middle + 1)
    if len(axes.get_legend_handles_labels()[0]) > 0:
        # Place the legend above the axes, so that it never covers a curve.
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, fontsize=9)
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
