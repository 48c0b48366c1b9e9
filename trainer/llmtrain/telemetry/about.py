"""The facts of a run that its metrics and its report need: the content of `run.json`."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from llmtrain.cluster.quantity import quantity
from llmtrain.comm.device import device_name
from llmtrain.comm.ranks import Ranks
from llmtrain.model.dtypes import DTYPES
from llmtrain.model.tensors import parameter_count
from llmtrain.plan.flops import datasheet_peak, flops_per_token
from llmtrain.plan.plan import Plan
from llmtrain.telemetry.meters import measured_peak
from llmtrain.telemetry.planned import planned_figures


@dataclass(frozen=True)
class MixedDevices:
    """Devices of several kinds. datasheet_peak: the mean of their data sheets in FLOP/s, None if one has none."""

    datasheet_peak: float | None


def mixed_devices(plan: Plan, ranks: Ranks) -> MixedDevices | None:
    """Return the devices of all ranks, None if all are of one kind. Collective."""
    name = device_name(ranks.device)
    every = ranks.gather_all([crc32(name.encode()), round(_datasheet_peak(plan, name) or 0)])
    if len({kind for kind, _ in every}) == 1:
        return None
    peaks = [peak for _, peak in every]
    return MixedDevices(sum(peaks) / len(peaks) if all(peaks) else None)


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Facts that the logger needs in addition to the plan.

    device: of this rank. mixed: the devices of all ranks, if they are of several kinds. model_state_bytes: parameters,
    gradients and optimizer states that this rank holds.
    unigram_entropy: of the validation tokens, in nats: the loss of the best model that sees no context. host_of: names
    a rank's machine. doing: returns the run's current activity, empty while it trains.
    """

    device: torch.device
    model_state_bytes: int
    mixed: MixedDevices | None = None
    unigram_entropy: float | None = None
    host_of: Callable[[int], str] = lambda rank: "this machine"
    doing: Callable[[], str] = lambda: ""


def describe(plan: Plan, about: RunInfo, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of `run.json`; rates in FLOP/s, entropy in nats. Measures the device's peak, if all ranks'
    devices are of one kind.

    before: the content at the run's last start; its measured peak is kept if it is higher and of the same device.
    """
    precision, name, tokens_per_step = plan.compute, device_name(about.device), plan.batch.tokens
    if about.mixed is None:
        datasheet = _datasheet_peak(plan, name)
        measured = max(measured_peak(about.device, DTYPES[precision]), _peak_before(before or {}, name, precision))
    else:
        datasheet, measured = about.mixed.datasheet_peak, None
    return {
        "name": plan.name,
        # A folder's name need not be UTF-8, but JSON must be.
        "cwd": os.fsencode(Path.cwd()).decode(errors="replace"),
        "model": asdict(plan.model),
        "parameters": parameter_count(plan.model),
        "steps": plan.training.steps,
        "tokens_per_step": tokens_per_step,
        "total_tokens": tokens_per_step * plan.training.steps,
        "flops_per_token": flops_per_token(plan.model, plan.batch.sequence_length),
        "world": plan.grid.world,
        "device": name if about.mixed is None else f"{name} and others",
        "precision": precision,
        "datasheet_peak": datasheet,
        "measured_peak": measured,
        "unigram_entropy": about.unigram_entropy,
        "planned": planned_figures(plan),
    }


def _peak_before(before: dict[str, Any], device: str, precision: str) -> float:
    same = (before.get("device"), before.get("precision")) == (device, precision)
    peak = before.get("measured_peak") if same else None
    return peak if isinstance(peak, float) and isfinite(peak) else 0.0


def _datasheet_peak(plan: Plan, device: str) -> float | None:
    """Return the peak of a device in FLOP/s, by its data sheet or the cluster's description; None if neither has it."""
    return datasheet_peak(device, plan.compute) or _stated_peak(plan, plan.compute)


def _stated_peak(plan: Plan, precision: str) -> float | None:
    """Return the peak in FLOP/s in the cluster's description, None on CPUs, which only simulate its accelerators."""
    cluster = plan.cluster
    if plan.device == "cpu" or cluster is None or cluster.accelerator is None:
        return None
    speed = cluster.accelerator.peak.get(precision)
    return None if speed is None else quantity(speed, "FLOP/s")
