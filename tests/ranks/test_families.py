"""Models of other families than the harness's train under sharding, pipelines and offload as in a single process."""

from collections.abc import Callable

import pytest
from harness import STEPS, Case, Result, worst_difference

Trained = Callable[[Case], Result]

FAMILIES = {name: (f"model.family={name}", "model.kv_heads=4") for name in ("gpt2", "neox")}
ALL_IN_FILES = ("offload.parameters=nvme", "offload.optimizer=nvme", "offload.paths=[.]", "offload.bucket=1024")
STAGE3 = ("zero.stage=3",)
LAYOUTS = {
    "stage 3": (2, STAGE3, 1, 1),
    "all in files": (2, (*STAGE3, *ALL_IN_FILES), 1, 1),
    "recomputed, activations outside": (
        2,
        (*STAGE3, "activation_checkpointing=full", "offload.activations=host"),
        1,
        1,
    ),
    "tensor": (4, STAGE3, 2, 1),
    "zero-bubble": (4, (*STAGE3, "pipeline.schedule=zero-bubble"), 1, 2),
    "tensor and 1F1B": (8, ("zero.stage=2", "offload.optimizer=host"), 2, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, layout: str, trained: Trained) -> None:
    world, keys, tensor, pipeline = LAYOUTS[layout]
    base = FAMILIES[family]
    case = Case(world, keys, base, accumulation=4, tensor=tensor, pipeline=pipeline)
    ours, theirs = trained(case), trained(case.reference)
    assert len(theirs.rows) == STEPS
    assert theirs.rows[-1]["loss"] < theirs.rows[0]["loss"] - 0.4
    difference, where = worst_difference(ours.curve, theirs.curve)
    assert difference < 1e-5, f"loss at {where} differs by {difference:.2e}"
