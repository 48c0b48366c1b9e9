"""How fast each stage's ranks compute, measured before layers are split among them (Holmes, section 3.3)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

import torch

from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.device import synchronize
from llmtrain.comm.ranks import Ranks

# Several windows: what else runs on a machine comes and goes, how fast it is stays.
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


@dataclass(frozen=True)
class Rate:
    """Products that a rank makes in a second: at best, and usually, which is less where something else runs beside."""

    best: float
    usual: float


def measured_speeds(work: Work, ranks: Ranks) -> tuple[float, ...] | None:
    """Return the speed of each place along the pipeline beside the fastest one's, 1, the same on every rank; None where
    they are alike. Takes a second. Collective."""
    # All begin together, as ranks that share a machine slow each other in training too.
    ranks.all_agree(True)
    own, values = _rate(work, ranks.device), [0.0] * (2 * ranks.layout.world)
    values[2 * ranks.rank : 2 * ranks.rank + 2] = [own.best, own.usual]
    values = ranks.sum_all(values)
    rates = [Rate(best, usual) for best, usual in zip(values[::2], values[1::2], strict=True)]
    return stage_speeds_of(rates, ranks.layout)


def stage_speeds_of(rates: Sequence[Rate], layout: Layout) -> tuple[float, ...] | None:
    """Return the speed of each place along the pipeline, that of its slowest rank, by every rank's rate; None where
    they are alike. One that is at best nearly as fast as a faster one usually is gets that one's speed."""
    slowest = [Rate(inf, inf)] * layout.degree(Axis.PIPELINE)
    for rank, rate in enumerate(rates):
        stage = layout.coordinate(rank, Axis.PIPELINE)
        slowest[stage] = Rate(min(slowest[stage].best, rate.best), min(slowest[stage].usual, rate.usual))
    speeds, level = [1.0] * len(slowest), Rate(inf, inf)
    for stage in sorted(range(len(slowest)), key=lambda stage: -slowest[stage].best):
        if level.best == inf or slowest[stage].best < level.usual * (1 - ALIKE):
            level = slowest[stage]
        speeds[stage] = level.best / max(rate.best for rate in slowest)
    return tuple(speeds) if min(speeds) < 1 else None


def _rate(work: Work, device: torch.device) -> Rate:
    """Return how often this rank computes what a forward and a backward pass need of one matrix."""
    inputs = torch.randn(min(work.rows, MOST_ROWS), work.hidden, dtype=work.dtype, device=device)
    weights = torch.randn(work.hidden, work.ffn, dtype=work.dtype, device=device)
    rates = []
    for _ in range(WINDOWS):
        count, begin, taken = 0, time.perf_counter(), 0.0
        while taken < SECONDS:
            outputs = inputs @ weights
            outputs @ weights.T
            inputs.T @ outputs
            synchronize(device)
            count, taken = count + 1, time.perf_counter() - begin
        rates.append(count / taken)
    return Rate(max(rates), median(rates))
