"""Models of all families whose norms, activations and rotary embeddings run in Triton's interpreter, on a CPU.

test_kernels_model_triton.py runs this file in a separate process, because TRITON_INTERPRET takes effect at import.
"""

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from llmtrain.model import layers
from llmtrain.model.dtypes import DTYPES
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.activations import deferred_bytes, recomputed_peak, stage_activations
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import parse_recipe
from llmtrain_kernels.activation import op as activation
from llmtrain_kernels.attention import op as attention
from llmtrain_kernels.norm import op as norm
from llmtrain_kernels.rotary import op as rotary
from torch import Tensor

from tests.kept import Counted, Kept, Setup, built, counted
from tests.triton_lab import rounded

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "neox": {"rotary_fraction": 0.34},
    "llama": {"kv_heads": 2},
    "one head": {"family": "llama", "heads": 1},
}
families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give tensors of a CPU to the GPU's kernels. Attention is torch's."""
    for module in (activation, layers, norm, rotary):
        monkeypatch.setattr(module, "takes_triton", lambda x: not torch.compiler.is_compiling())
    for module in (activation, norm):
        monkeypatch.setattr(module, "takes_native", lambda x: False)
    monkeypatch.setattr(attention, "_suits_kernel", lambda *about: False)
    # The interpreter leaves cycles of references to its last tensors.
    places = Kept.places
    monkeypatch.setattr(Kept, "places", lambda self: (gc.collect(), places(self))[1])
    with rounded(monkeypatch):
        yield


def plan_of(family: str, **settings: Any) -> Plan:
    """Return the plan of a pipeline of two stages, with odd sizes, and what our kernels keep on a GPU."""
    model = {"family": family, "layers": 2, "hidden": 36, "heads": 6, "vocab": 61, "ffn": 46} | FAMILIES[family]
    recipe = {
        "name": "small",
        "model": {**model, "dropout": settings.get("dropout", 0.0)},
        "data": {"path": "corpus", "sequence_length": 5},
        "train": {"global_batch": 2 * 4, "microbatch": 2},
        "precision": {"compute": settings.get("compute", "fp32")},
        "parallel": {"pipeline": 2},
        "pipeline": {"schedule": settings.get("schedule", "1f1b")},
        "activation_checkpointing": settings.get("recompute", "none"),
    }
    plan = make_plan(parse_recipe(recipe), Facts(world=2, device="cpu"))
    return replace(plan, kernels=replace(plan.kernels, statistic=4, rotates_in_place=True))


@families
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"compute": "bf16", "schedule": "zero-bubble"},
        {"recompute": "full"},
        {"dropout": 0.1},
    ],
    ids=str,
)
@pytest.mark.usefixtures("on_triton")
def test_saved_tensors_are_as_planned(settings: dict[str, Any], family: str) -> None:
    plan = plan_of(family, **settings)
    for (layout,) in plan.pipeline.stages:
        deferred = deferred_bytes(plan, layout)
        setup = Setup(plan.model, DTYPES[plan.compute], 1, False, deferred > 0)
        found = counted(setup, layout, torch.arange(12).view(2, 6))
        planned = Counted(stage_activations(plan, layout), recomputed_peak(plan, layout), deferred)
        assert found == planned, layout


def trained(plan: Plan) -> list[Tensor]:
    """Return the loss and all gradients."""
    layout = replace(plan.pipeline.stages[0][0], closes=True, end=plan.model.layers)
    model = built(Setup(plan.model, DTYPES[plan.compute]), [layout])
    rows = torch.arange(12).view(2, 6)
    loss = model(rows[:, :-1], rows[:, 1:])
    return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]


@families
@pytest.mark.parametrize(("compute", "recompute"), [("fp32", "full"), ("bf16", "none")])
def test_equals_torch(compute: str, recompute: str, family: str, request: pytest.FixtureRequest) -> None:
    """Compared to fp64, the loss and the gradients are as near as those of torch's operations."""
    plan = plan_of(family, compute=compute, recompute=recompute)
    theirs = trained(plan)
    request.getfixturevalue("on_triton")
    for mine, other in zip(trained(plan), theirs, strict=True):
        assert mine.dtype == other.dtype
        tolerance = 2e-6 if compute == "fp32" else 3e-2
        assert (mine.double() - other.double()).norm() <= tolerance * other.double().norm()


@pytest.mark.usefixtures("on_triton")
def test_compiled_blocks_take_the_plain_forms() -> None:
    """torch.compile makes kernels of its own, in one graph."""
    plan = plan_of("llama")
    (layout,) = plan.pipeline.stages[1]
    block = built(Setup(plan.model, torch.float32), [layout]).blocks["1"]
    x, angles = torch.randn(2, 5, 36), torch.rand(5, 1, 3)
    plain = block(x, (angles.cos(), angles.sin()))
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)(x, (angles.cos(), angles.sin()))
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)
