"""What may be stepped before the norm is known: how much the plan chooses, and what memory it takes."""

import re
from pathlib import Path

import pytest
import torch
from llmtrain.errors import BadInputError
from llmtrain.model.dtypes import DTYPES
from llmtrain.offload.optimizer_states import open_states
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.offload_memory import offload_memory
from llmtrain.plan.per_rank.rank_buckets import rank_buckets
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.views.view import PlanView, view_recipe
from llmtrain.recipe.load import load_recipe

RECIPE = """
model: {family: gpt2, layers: 2, hidden: 64, heads: 2, vocab: 512}
data: {path: set, sequence_length: 32}
"""


def test_what_is_stepped_ahead_fills_the_host(tmp_path: Path) -> None:
    """`offload.spare: auto` is the largest number of eighths that fits; none where a CPU computes."""
    (tmp_path / "r.yaml").write_text(RECIPE)

    def view(*keys: str, memory: int | None = None) -> PlanView:
        host = "" if memory is None else f", host: {{memory: {2 * memory}B}}"
        cluster = f"cluster={{accelerator: {{name: A100-80GB}}, node: {{ranks: 2{host}}}}}"
        fixed = ("offload.optimizer=host", "offload.share=1", "offload.bucket=1024")
        return view_recipe(str(tmp_path / "r.yaml"), [cluster, *fixed, *keys], 2)

    assert view().plan.sharding.offload.spare == 0.25
    assert view("offload.spare=0.5").plan.sharding.offload.spare == 0.5
    # Sums of gradients that rest on the host are complete only after the last pass.
    assert view("offload.parameters=host").plan.sharding.offload.spare == 0
    assert (
        make_plan(
            load_recipe(str(tmp_path / "r.yaml"), ["offload.optimizer=host"]), Facts(world=2, device="cpu")
        ).sharding.offload.spare
        == 0
    )
    for spare in (0, 0.125, 0.875, 1):
        needed = view(f"offload.spare={spare}").budget.host
        found = view(memory=needed)
        assert found.plan.sharding.offload.spare == found.plan.record["offload"]["spare"] == spare
        assert found.problem is None
        if spare:
            assert view(memory=needed - 1).plan.sharding.offload.spare == spare - 0.125


def test_weights_that_are_stepped_ahead_wait_on_the_device_if_they_fit(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)

    def view(*keys: str, memory: int | None = None) -> PlanView:
        stated = "" if memory is None else f", memory: {memory}B"
        cluster = f"cluster={{accelerator: {{name: A100-80GB{stated}}}, node: {{ranks: 2}}}}"
        fixed = ("offload.optimizer=host", "offload.share=1", "offload.spare=1", "train.microbatch=1")
        return view_recipe(str(tmp_path / "r.yaml"), [cluster, *fixed, *keys], 2)

    def waits(found: PlanView) -> str:
        assert found.plan.record["offload"]["spare_weights"] == found.plan.sharding.offload.spare_weights
        return found.plan.sharding.offload.spare_weights

    host, device = (view(f"offload.spare_weights={where}") for where in ("host", "device"))
    (on_host,), (on_device,) = host.budget.rows, device.budget.rows
    ahead = sum(2 * one.numel for one in rank_buckets(host.plan, 0))
    assert on_device.total == on_host.total + ahead
    assert sum(on_device.host.values()) == sum(on_host.host.values()) - ahead
    # Not where the device's memory is unknown.
    assert waits(view()) == "host"
    assert waits(view(memory=on_device.total)) == "device"
    assert waits(view(memory=on_device.total - 1)) == "host"
    refused = view("offload.spare_weights=device", memory=on_device.total - 1).problem
    assert refused is not None
    assert "set offload.spare_weights=host" in refused


@pytest.mark.parametrize("where", ["host", "device"])
def test_weights_that_wait_on_the_device_take_what_is_planned(where: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    keys = ("offload.optimizer=host", "offload.spare=0.5", "offload.spare_weights=device", f"offload.step={where}")
    plan = make_plan(load_recipe(str(tmp_path / "r.yaml"), keys), Facts(world=1, device="cuda"))
    offload, dtype = plan.sharding.offload, DTYPES[plan.compute]
    states = open_states(offload, rank_buckets(plan, 0), torch.device("cpu"), dtype, DTYPES[plan.gradients])
    assert states is not None
    expected = offload_memory(plan, 0)
    assert states.device_nbytes == expected.slots + expected.ahead > 0
    assert states.nbytes == expected.host + expected.spare
    states.close()


@pytest.mark.parametrize("key", ["offload.spare_weights=device", "offload.step=device"])
def test_what_is_stepped_ahead_fits_the_device(key: str, tmp_path: Path) -> None:
    """Also where the host's memory is not stated."""
    (tmp_path / "r.yaml").write_text(RECIPE)

    def view(memory: int | None, *keys: str) -> PlanView:
        stated = "" if memory is None else f", memory: {memory}B"
        cluster = f"cluster={{accelerator: {{name: A100-80GB{stated}}}, node: {{ranks: 2}}}}"
        fixed = ("offload.optimizer=host", "offload.share=1", "offload.bucket=1024", "train.microbatch=1", key)
        return view_recipe(str(tmp_path / "r.yaml"), [cluster, *fixed, *keys], 2)

    (without,), (with_some,) = (view(None, f"offload.spare={spare}").budget.rows for spare in (0, 0.25))
    assert with_some.total > without.total
    found = view(without.total)
    assert found.problem is None
    assert found.plan.sharding.offload.spare == 0
    assert view(with_some.total).plan.sharding.offload.spare == 0.25
    refused = view(without.total, "offload.spare=0.25").problem
    assert refused is not None
    advised = "offload.spare_weights=host" if key.startswith("offload.spare") else "offload.spare=0.0"
    assert f"set {advised}, which" in refused


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["offload={optimizer: nvme, paths: [a, b, a]}"], "paths has a twice; give a folder of each volume"),
        (
            ["cluster={node: {ranks: 1, nvme: [{path: /a}, {path: /a}]}}"],
            "nvme[1].path is /a, as that of another drive; give a folder of each",
        ),
    ],
)
def test_a_volume_is_named_once(keys: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    with pytest.raises(BadInputError, match=re.escape(said)):
        load_recipe(str(tmp_path / "r.yaml"), keys)
