"""Measures how fast each stage's ranks compute, before layers are split among them (Holmes, section 3.3)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

import torch

from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.device import synchronize
from llmtrain.comm.ranks import Ranks

# Several windows, because other programs on the machine may slow some of them.
WINDOWS, SECONDS = 8, 0.1
# The most rows of the matrices. More rows take longer and do not change the result.
MOST_ROWS = 1024
# Speeds that differ by less count as equal, so that equal ranks get the same layers in every run.
TOLERANCE = 0.1


@dataclass(frozen=True)
class MatmulShape:
    """The matrix product that takes most of a model's time: `[rows, hidden] x [hidden, ffn]`."""

    rows: int
    hidden: int
    ffn: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ComputeRate:
    """Products that a rank computes per second. best: in the fastest of all windows of time. usual: the median of the
    windows, which is lower if other programs run on the machine."""

    best: float
    usual: float


def measured_speeds(work: MatmulShape, ranks: Ranks) -> tuple[float, ...] | None:
    """Return the speed of each pipeline rank relative to the fastest, equal on every rank; None if all are equal. It
    takes a second. Collective."""
    # All ranks start together: ranks that share a machine slow each other in training too.
    ranks.all_agree(True)
    own, values = _rate(work, ranks.device), [0.0] * (2 * ranks.layout.world)
    values[2 * ranks.rank : 2 * ranks.rank + 2] = [own.best, own.usual]
    values = ranks.sum_all(values)
    rates = [ComputeRate(best, usual) for best, usual in zip(values[::2], values[1::2], strict=True)]
    return stage_speeds_of(rates, ranks.layout)


def stage_speeds_of(rates: Sequence[ComputeRate], layout: Layout) -> tuple[float, ...] | None:
    """Return the speed of each pipeline rank relative to the fastest, from every rank's rate; None if all are equal.

    A pipeline rank is as fast as the slowest of its replicas. If its best rate is close to the median rate of a faster
    pipeline rank, the two count as equal.
    """
    slowest = [ComputeRate(inf, inf)] * layout.degree(Axis.PIPELINE)
    for rank, rate in enumerate(rates):
        stage = layout.coordinate(rank, Axis.PIPELINE)
        slowest[stage] = ComputeRate(min(slowest[stage].best, rate.best), min(slowest[stage].usual, rate.usual))
    speeds, level = [1.0] * len(slowest), ComputeRate(inf, inf)
    for stage in sorted(range(len(slowest)), key=lambda stage: -slowest[stage].best):
        if level.best == inf or slowest[stage].best < level.usual * (1 - TOLERANCE):
            level = slowest[stage]
        speeds[stage] = level.best / max(rate.best for rate in slowest)
    return tuple(speeds) if min(speeds) < 1 else None


def _rate(work: MatmulShape, device: torch.device) -> ComputeRate:
    """Return how often per second this rank computes the products of one matrix in a forward and a backward pass."""
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
    return ComputeRate(max(rates), median(rates))
