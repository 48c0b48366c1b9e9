"""How fast each stage's ranks compute, measured before layers are split among them (Holmes, section 3.3)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.ranks import Ranks

# The best of several windows: what else runs on a machine comes and goes, how fast it is stays.
WINDOWS, SECONDS = 8, 0.1
# Rows of the matrices multiplied; more of them take longer and tell no more.
MOST_ROWS = 1024
# Speeds that differ by less are taken as equal, so that ranks which are alike get the same layers in every run.
ALIKE = 0.1


@dataclass(frozen=True)
class Work:
    """The matrix product that a model mostly consists of: `[rows, hidden] x [hidden, ffn]`."""

    rows: int
    hidden: int
    ffn: int
    dtype: torch.dtype


def measured_speeds(work: Work, ranks: Ranks) -> tuple[float, ...] | None:
    """Return the speed of each place along the pipeline beside the fastest one's, 1, the same on every rank; None where
    they are alike. Takes a second. Collective."""
    rates = [0.0] * ranks.layout.world
    # All begin together, as ranks that share a machine slow each other in training too.
    ranks.all_agree(True)
    rates[ranks.rank] = _products_per_second(work, ranks.device)
    return stage_speeds_of(ranks.sum_all(rates), ranks.layout)


def stage_speeds_of(rates: Sequence[float], layout: Layout) -> tuple[float, ...] | None:
    """Return the speed of each place along the pipeline, that of its slowest rank, by every rank's rate; None where
    they are alike. Those that are nearly as fast as a faster one get its speed."""
    slowest = [float("inf")] * layout.degree(Axis.PIPELINE)
    for rank, rate in enumerate(rates):
        stage = layout.coordinate(rank, Axis.PIPELINE)
        slowest[stage] = min(slowest[stage], rate)
    fastest = max(slowest)
    levels: list[float] = []
    for speed in sorted((rate / fastest for rate in slowest), reverse=True):
        if not levels or speed < levels[-1] * (1 - ALIKE):
            levels.append(speed)
    if len(levels) == 1:
        return None
    return tuple(min(level for level in levels if level >= rate / fastest) for rate in slowest)


def _products_per_second(work: Work, device: torch.device) -> float:
    """Return how often this rank computes what a forward and a backward pass need of one matrix."""
    inputs = torch.randn(min(work.rows, MOST_ROWS), work.hidden, dtype=work.dtype, device=device)
    weights = torch.randn(work.hidden, work.ffn, dtype=work.dtype, device=device)
    best = 0.0
    for _ in range(WINDOWS):
        count, begin, taken = 0, time.perf_counter(), 0.0
        while taken < SECONDS:
            outputs = inputs @ weights
            outputs @ weights.T
            inputs.T @ outputs
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            count, taken = count + 1, time.perf_counter() - begin
        best = max(best, count / taken)
    return best
