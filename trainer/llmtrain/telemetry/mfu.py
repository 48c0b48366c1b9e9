"""MFU, model FLOPs utilization: the share of a peak that the rate of a rank reaches (PaLM, appendix B).

The rate counts the FLOPs of the model alone (`llmtrain.plan.flops.flops_per_token`), none of recomputation. There are
two peaks, both in `run.json` (`llmtrain.telemetry.about`): `mfu` is a share of the card's data sheet, or of the peak
that the cluster file states; `mfu_measured` is a share of the best rate that a product of matrices reached when the run
started.
"""

from collections.abc import Mapping
from typing import Any

from llmtrain.telemetry.metrics import Row


def share_of(rate: float, fastest: float, peak: float | None) -> float | None:
    """Return `rate / peak`; None if the peak is unknown or wrong.

    fastest: the best rate so far. If it exceeds the peak, the peak is wrong.
    """
    return rate / peak if peak and fastest <= peak else None


class Utilization:
    """The rates of a run's steps since its start, and the shares of the peaks that they reach."""

    def __init__(self) -> None:
        # The best rate of a rank in a logged step, in FLOP/s.
        self._fastest = 0.0

    def row(self, run: Mapping[str, Any], seconds: float) -> Row:
        """Return a step's rates for the metrics file. run: content of `run.json`. seconds: the duration of the step."""
        tokens_per_s = run["tokens_per_step"] / seconds
        per_rank = run["flops_per_token"] * tokens_per_s / run["world"]
        self._fastest = max(self._fastest, per_rank)
        return {
            "tokens_per_s": tokens_per_s,
            "tflops_per_rank": per_rank / 1e12,
            "mfu": share_of(per_rank, self._fastest, run["datasheet_peak"]),
            "mfu_measured": share_of(per_rank, self._fastest, run["measured_peak"]),
        }
