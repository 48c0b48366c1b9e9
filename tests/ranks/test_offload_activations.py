"""Offloaded activations: every layout trains with the bits that it has without offload."""

from dataclasses import replace

import pytest
from _pytest.mark import ParameterSet

from tests.ranks.harness import Case, Trained, assert_same_states

TIERS = {
    "host": ("offload.activations=host",),
    "nvme": ("offload.activations=nvme", "offload.paths=[.]"),
}
# Norms that clipping cuts.
RECOMPUTED = ("activation_checkpointing=full", "model.layers=6", "optimizer.clip=0.05")
LAYOUTS = {
    **{f"stage {stage}": Case(2, (f"zero.stage={stage}",), accumulation=4) for stage in range(4)},
    "mics": Case(4, ("zero.preset=mics",), node=2, accumulation=4),
    "topo": Case(4, ("zero.preset=topo",), node=2, accumulation=4),
    "2x2x2": Case(8, ("zero.stage=1",), node=4, accumulation=4, tensor=2, pipeline=2),
    "2x2x2, bf16, sequence-parallel, zero-bubble": Case(
        8,
        ("zero.stage=2", "precision.compute=bf16", "pipeline.schedule=zero-bubble", "parallel.sequence=true"),
        node=4,
        accumulation=4,
        tensor=2,
        pipeline=2,
    ),
    "zero-bubble-v, dropout": Case(
        2, ("pipeline.schedule=zero-bubble-v", "model.dropout=0.1"), accumulation=4, pipeline=2
    ),
    "interleaved, fp16 that overflows": Case(
        2,
        ("pipeline.schedule=interleaved", "precision.compute=fp16", "precision.loss_scale=1.0e+9"),
        accumulation=4,
        pipeline=2,
    ),
    "gpipe, stage 3, groups of two": Case(
        4,
        ("pipeline.schedule=gpipe", "zero.stage=3", "model.layers=12", "activation_checkpointing={every: 2}"),
        accumulation=4,
        pipeline=2,
    ),
}
BESIDE = {name: replace(case, keys=(*RECOMPUTED, *case.keys)) for name, case in LAYOUTS.items()}
OFFLOADED = {
    (name, tier): replace(case, keys=(*case.keys, *keys))
    for name, case in BESIDE.items()
    for tier, keys in TIERS.items()
}
# The others are soak tests.
SOON = {("stage 3", "nvme"), ("zero-bubble-v, dropout", "host")}


def beside() -> list[ParameterSet]:
    soon = {name for name, _ in SOON}
    return [pytest.param(case, marks=_mark(name in soon)) for name, case in BESIDE.items()]


def _mark(soon: bool) -> tuple[pytest.MarkDecorator, ...]:
    return () if soon else (pytest.mark.soak,)


@pytest.mark.parametrize(
    "case",
    [*beside(), *(pytest.param(case, marks=_mark(key in SOON)) for key, case in OFFLOADED.items())],
    ids=str,
)
def test_trains(case: Case, trained: Trained) -> None:
    assert trained(case).curve


@pytest.mark.parametrize(("name", "tier"), [pytest.param(*key, marks=_mark(key in SOON)) for key in OFFLOADED])
def test_results_do_not_depend_on_where_activations_rest(name: str, tier: str, trained: Trained) -> None:
    ours, theirs = trained(OFFLOADED[name, tier]), trained(BESIDE[name])
    assert ours.curve == theirs.curve
    assert_same_states(ours, theirs)
    for row in ours.rows:
        moved = row["offload"]["activations"]
        assert moved["read_bytes"] == moved["written_bytes"]
        assert all(count > 0 for count in moved["read_bytes"].values())
