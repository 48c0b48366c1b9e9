"""A checkpoint of states that rest anywhere resumes with states anywhere else, with the bits of a run whose states
never left."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
from _pytest.mark import ParameterSet

from tests.ranks.harness import STEPS, Case, Result, Trainer, assert_same_states, resumed

HALF = STEPS // 2
# Buckets of which each unit has several, and another size of them after the resume.
TIERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "host 0.3": ("offload.optimizer=host", "offload.bucket=2048", "offload.share=0.3"),
    "nvme": ("offload.optimizer=nvme", "offload.paths=[.]", "offload.bucket=1024"),
    "nvme 0": ("offload.optimizer=nvme", "offload.paths=[.]", "offload.share=0"),
    "nvme 0.3": ("offload.optimizer=nvme", "offload.paths=[.]", "offload.bucket=3072", "offload.share=0.3"),
    "host": ("offload.optimizer=host", "offload.bucket=2048"),
}
LAYOUTS = {
    "stage 2, fp32": Case(2, ("zero.stage=2",)),
    "stage 1, bf16": Case(2, ("zero.stage=1", "precision.compute=bf16")),
}
# From each tier to the next one; the others are soak tests.
SOON = [*pairwise(TIERS), ("host", "none")]
ALL = [pair for pair in product(TIERS, repeat=2) if pair != ("none", "none")]
OTHER = Case(4, ("zero.stage=3",), node=2)


def marked(layout: str, source: str, target: str) -> ParameterSet:
    now = layout == "stage 2, fp32" and (source, target) in SOON
    return pytest.param(layout, source, target, marks=() if now else pytest.mark.soak)


def on(case: Case, tier: str) -> Case:
    return replace(case, keys=(*case.keys, *TIERS[tier]))


def same(ours: Result, theirs: Result, first: int) -> None:
    """Check the losses after step `first`, and all states at the end."""
    rest = {key: loss for key, loss in theirs.curve.items() if key[1] > first}
    assert len(rest) == STEPS - first + 1
    assert ours.curve == rest
    assert_same_states(ours, theirs)


@pytest.mark.parametrize(
    ("layout", "source", "target"), [marked(*key) for key in ((one, *p) for one in LAYOUTS for p in ALL)]
)
def test_from_any_tier_to_any_other(layout: str, source: str, target: str, trainer: Trainer) -> None:
    case = LAYOUTS[layout]
    trainer.train([on(case, tier) for tier in dict.fromkeys(("none", source))])
    moved = resumed(on(case, target), trainer.result(on(case, source)), HALF)
    trainer.train([moved])
    same(trainer.result(moved), trainer.result(on(case, "none")), HALF)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(*pair, marks=() if pair == ("nvme 0.3", "nvme") else pytest.mark.soak)
        for pair in product(("host", "nvme", "nvme 0.3"), ("host 0.3", "nvme"))
    ],
)
def test_to_another_layout(source: str, target: str, trainer: Trainer) -> None:
    """The same bits as a resume of that layout whose states do not leave."""
    first = on(LAYOUTS["stage 2, fp32"], source)
    trainer.train([first])
    cases = [resumed(on(OTHER, tier), trainer.result(first), HALF) for tier in (target, "none")]
    trainer.train(cases)
    moved, beside = map(trainer.result, cases)
    same(moved, beside, HALF)
