"""What `offload.share: auto` and `offload.gradients: auto` become where the weights rest outside of the GPU."""

from pathlib import Path

import pytest
from llmtrain.plan.cost.lane_times import CPU, DEVICE, lane_times
from llmtrain.plan.cost.volume_traffic import moved_of
from llmtrain.plan.memory.memory_budget import memory_budget
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.by_rank import programs_of
from llmtrain.plan.resolve.check import advice
from llmtrain.plan.resolve.described import described_run
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.yaml.dump import to_yaml

RECIPE = """
model: {family: llama, layers: 8, hidden: 1024, heads: 8, ffn: 4096, vocab: 1024}
data: {path: set, sequence_length: 512}
train: {global_batch: 16, microbatch: 1}
precision: {compute: bf16}
activation_checkpointing: full
offload: {optimizer: host, parameters: host}
cluster: {accelerator: {memory: 80GB, host_link: 25GB/s}, node: {ranks: 1, host: {memory: 100GB, bandwidth: 100GB/s}}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)


def made(*keys: str) -> Plan:
    return make_plan(*described_run("recipe.yaml", keys, 1))


def busiest(plan: Plan) -> int:
    programs = programs_of(plan)
    lanes = lane_times(plan, programs, moved_of(plan, programs))
    return max(lane.nbytes for lane in lanes if lane.name not in (CPU, DEVICE))


@pytest.mark.parametrize("rate", ["cluster.accelerator.host_link=25GB/s", "cluster.accelerator.host_link=null"])
@pytest.mark.parametrize("memory", ["1.6GB", "2.3GB"])
def test_memory_serves_what_moves_most(memory: str, rate: str) -> None:
    """Gradients and weights move for each microbatch, states once a step."""
    stated = (f"cluster.accelerator.memory={memory}", rate)
    plan = made(*stated)
    assert memory_budget(plan).excess == 0
    others = [
        made(*stated, "offload.gradients=host"),
        made(*stated, "offload.gradients=host", "offload.share=1"),
        made(*stated, "offload.share=1", "zero.resident=0", "offload.gradients=host"),
    ]
    assert busiest(plan) <= min(map(busiest, others))
    assert busiest(plan) < 0.5 * busiest(others[-1])


def test_sums_of_gradients_stay_where_they_fit() -> None:
    def on(memory: str) -> str:
        record = made(f"cluster.accelerator.memory={memory}").record
        return str(record["offload"]["gradients"])

    assert (on("1.2GB"), on("3GB")) == ("host", "none")


VOLUME = "cluster.node.nvme=[{path: /scratch, bandwidth: 1GB/s}]"
IN_FILES = (VOLUME, "offload.optimizer=nvme", "offload.parameters=nvme")
SMALL_HOST = "cluster.node.host.memory=4GB"


@pytest.mark.parametrize(("host", "gradients"), [("100GB", "host"), ("2GB", "nvme"), ("null", "nvme")])
def test_sums_of_gradients_rest_on_a_host_with_room_for_them(host: str, gradients: str) -> None:
    """Weights rest in files. On the device, the sums have no room."""
    plan = made(*IN_FILES, "cluster.accelerator.memory=1.2GB", f"cluster.node.host.memory={host}")
    assert plan.record["offload"]["gradients"] == gradients
    assert not memory_budget(plan).exceeds


SIZES = ("activation_checkpointing=auto", "train.microbatch=auto", "train.global_batch=64")


@pytest.mark.parametrize(
    ("memory", "key", "recomputes"),
    [
        ("1.4GB", "cluster.accelerator.peak={bf16: 100TFLOP/s}", True),
        ("1.4GB", "cluster.accelerator.peak={bf16: 1TFLOP/s}", False),
        # Without its rate, the link counts with its bytes.
        ("1.4GB", "cluster.accelerator.host_link=null", True),
        ("80GB", "pipeline.schedule=breadth-first", False),
        ("4GB", "offload.parameters=none", False),
    ],
)
def test_larger_microbatches_pay_for_recomputation_where_the_link_is_slow(
    memory: str, key: str, recomputes: bool
) -> None:
    """Weights and gradients move for each microbatch."""
    keys = (*SIZES, f"cluster.accelerator.memory={memory}", key)
    plan = made(*keys)
    other = made(*keys[1:], f"activation_checkpointing={'none' if recomputes else 'full'}")
    assert (plan.recomputes, other.recomputes) == (recomputes, not recomputes)
    assert (plan.batch.microbatch > other.batch.microbatch) is recomputes
    if recomputes:
        assert busiest(plan) < 0.75 * busiest(other)
    Path("again.yaml").write_text(to_yaml(plan.record))
    assert make_plan(*described_run("again.yaml", [], 1)) == plan


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("cluster.node.host.memory=null",), "on the host with offload.activations=host"),
        ((), "on the host with offload.activations=host"),
        ((SMALL_HOST, VOLUME), "in files with offload.activations=nvme"),
        ((SMALL_HOST,), None),
        ((SMALL_HOST, "activation_checkpointing=none"), "larger train.microbatch with"),
    ],
    ids=str,
)
def test_breadth_first_is_advised_where_what_it_keeps_has_room(keys: tuple[str, ...], said: str | None) -> None:
    stated = ("cluster.accelerator.memory=1.6GB", "train.global_batch=256", "offload.gradients=host")
    recipe, facts = described_run("recipe.yaml", (*stated, *keys), 1)
    plan = make_plan(recipe, facts)
    assert not memory_budget(plan).host_excess
    found = [one for one in advice(recipe, plan) if "move for each" in one]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


@pytest.mark.parametrize(
    ("memory", "keys", "moved"),
    [
        ("1.2GB", (), "gradients"),
        ("3GB", (), None),
        ("3GB", ("zero.resident=0",), "weights"),
        ("1.2GB", ("pipeline.schedule=breadth-first",), None),
        ("1.2GB", ("train.global_batch=2",), None),
    ],
)
def test_what_moves_for_each_microbatch_is_said(memory: str, keys: tuple[str, ...], moved: str | None) -> None:
    recipe, facts = described_run("recipe.yaml", (f"cluster.accelerator.memory={memory}", *keys), 1)
    found = [one for one in advice(recipe, make_plan(recipe, facts)) if "move for each" in one]
    assert [one.partition(" move for each of the 16")[0] for one in found] == ([f"offloaded {moved}"] if moved else [])


def test_nothing_moves_to_the_memory_that_computes() -> None:
    """A CPU's memory is the host's; files are elsewhere there too."""
    for tier, moves in (("host", False), ("nvme", True)):
        keys = (f"offload.optimizer={tier}", f"offload.parameters={tier}", "offload.paths=[]", "zero.resident=0")
        cluster = ("cluster.accelerator=null", "cluster.node.nvme=[{path: /scratch}]")
        recipe, facts = described_run("recipe.yaml", (*keys, *cluster), 1)
        assert facts.device == "cpu"
        assert any("move for each" in one for one in advice(recipe, make_plan(recipe, facts))) is moves


def test_a_record_makes_the_same_plan() -> None:
    plan = made("cluster.accelerator.memory=2.6GB")
    Path("again.yaml").write_text(to_yaml(plan.record))
    recipe = load_recipe("again.yaml", [])
    assert recipe.offload.gradients == "none"
    assert make_plan(*described_run("again.yaml", [], 1)) == plan
