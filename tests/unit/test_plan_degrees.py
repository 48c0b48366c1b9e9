"""The degrees that a recipe resolves to, and recipes that are refused before anything starts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from llmtrain.errors import BadInputError
from llmtrain.model.tensors import model_units
from llmtrain.plan.facts import Facts
from llmtrain.plan.per_rank.states import STATES_SHARE
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.prepare import check_and_plan
from llmtrain.recipe.load import load_recipe, parse_recipe
from llmtrain_data.indexed import IndexedWriter

FRONTIER = "cluster={node: {ranks: 8, tiers: [{name: die, ranks: 2}]}}"


@pytest.fixture(autouse=True)
def _in_folder_with_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = IndexedWriter(Path("set"), np.dtype(np.uint16))
    writer.add(np.zeros(1000, dtype=np.uint16), np.array([1000]))
    writer.commit()
    Path("tiny.yaml").write_text(
        "model: {family: llama, layers: 2, hidden: 32, heads: 4, vocab: 64}\n"
        "data: {path: set, sequence_length: 16, split: [1, 0, 0]}\n"
        "train: {global_batch: 48, eval_every: 0}\n"
    )


def plan(world: int, node: int, *overrides: str) -> Plan:
    facts = Facts(world=world, device="cpu", ranks_per_node=node)
    return check_and_plan(load_recipe("tiny.yaml", overrides), facts)


def degrees(world: int, node: int, *overrides: str) -> tuple[int, ...]:
    found = plan(world, node, *overrides).sharding.placements["head"].degrees
    assert found.ranks == world
    return found.weights, found.gradients, found.optimizer, found.secondary


@pytest.mark.parametrize(
    ("world", "node", "overrides", "expected"),
    [
        (8, 4, [], (1, 1, 1, 0)),
        (8, 4, ["zero.stage=0"], (1, 1, 1, 0)),
        (8, 4, ["zero.stage=1"], (1, 1, 8, 0)),
        (8, 4, ["zero.stage=2"], (1, 8, 8, 0)),
        (8, 4, ["zero.stage=3"], (8, 8, 8, 0)),
        (8, 4, ["zero.stage=3", "zero.secondary=node"], (8, 8, 8, 4)),
        (8, 4, ["zero.stage=3", "zero.partition.weights=node"], (4, 8, 8, 0)),
        (8, 4, ["zero.stage=1", "zero.partition.gradients=node"], (1, 4, 8, 0)),
        (8, 4, ["zero.partition.weights=2"], (2, 2, 2, 0)),
        (8, 4, ["zero.partition.gradients=2"], (1, 2, 2, 0)),
        (8, 4, ["zero.partition={weights: 2, gradients: node, optimizer: all}"], (2, 4, 8, 0)),
        (8, 4, ["zero.partition={weights: 2, gradients: node, optimizer: all}", "zero.secondary=all"], (2, 4, 8, 8)),
        (8, 4, ["zero.partition={weights: auto, optimizer: all}"], (4, 4, 8, 0)),
        # Given degrees limit the numbers to choose from.
        (8, 4, ["zero.stage=2", "zero.partition.optimizer=auto"], (1, 8, 8, 0)),
        (8, 4, ["zero.partition={weights: auto, gradients: 2, optimizer: 8}"], (2, 2, 8, 0)),
        (8, 1, ["zero.partition.weights=auto", "zero.secondary=2"], (2, 2, 2, 2)),
        (8, 4, ["zero.preset=mics"], (4, 4, 4, 0)),
        (8, 4, ["zero.preset=mics", "zero.partition.weights=2"], (2, 2, 2, 0)),
        (8, 4, ["zero.preset=zero++"], (8, 8, 8, 4)),
        (8, 4, ["zero.preset=zero++", "zero.secondary=0"], (8, 8, 8, 0)),
        (8, 4, ["zero.preset=topo"], (4, 4, 8, 4)),
        (16, 8, ["zero.preset=topo", FRONTIER], (2, 8, 16, 2)),
        (16, 8, ["zero.preset=topo", FRONTIER, "zero.secondary=8"], (2, 8, 16, 8)),
        (16, 8, ["zero.stage=3", "zero.secondary=die", FRONTIER], (16, 16, 16, 2)),
        (16, 16, ["zero.preset=zero++", FRONTIER], (16, 16, 16, 8)),
        (8, 8, ["zero.preset=mics", "zero.partition.weights=cluster"], (8, 8, 8, 0)),
        (6, 3, ["zero.preset=topo"], (3, 3, 6, 3)),
        (6, 4, ["zero.preset=mics"], (2, 2, 2, 0)),  # nodes of 4 and 2 ranks have 2 in common
        (3, 1, ["zero.preset=topo"], (1, 1, 3, 0)),  # a node of one rank has nothing to share
        *((1, 1, [f"zero.preset={preset}"], (1, 1, 1, 0)) for preset in ("mics", "zero++", "topo")),
        (1, 1, ["zero.stage=3"], (1, 1, 1, 0)),
        (1, 1, ["zero.stage=3", "zero.secondary=node"], (1, 1, 1, 0)),
    ],
)
def test_degrees(world: int, node: int, overrides: list[str], expected: tuple[int, ...]) -> None:
    assert degrees(world, node, *overrides) == expected


@pytest.mark.parametrize(
    ("world", "overrides", "expected"),
    [
        (4, ["zero.preset=mics"], ("none", "none", "none")),
        (4, ["zero.preset=zero++"], ("int8", "none", "int4")),
        (4, ["zero.preset=topo"], ("int8", "int8", "int4")),
        (4, ["zero.preset=topo", "quantize.gradients=none"], ("int8", "int8", "none")),
        (4, ["zero.preset=mics", "quantize.gradients=int4"], ("none", "none", "int4")),
        (4, ["zero.preset=topo", "zero.secondary=0"], ("int8", "none", "int4")),
        (4, [], ("none", "none", "none")),
        # A recipe for many ranks also runs on one, where there is no communication.
        (1, ["zero.preset=topo"], ("none", "none", "none")),
        (1, ["quantize={weights: int8, gradients: int4}"], ("none", "none", "none")),
    ],
)
def test_what_is_quantized(world: int, overrides: list[str], expected: tuple[str, ...]) -> None:
    quantize = plan(world, 2 if world > 1 else 1, *overrides).record["quantize"]
    assert (quantize["weights"], quantize["secondary"], quantize["gradients"]) == expected


def test_the_record_says_everything_and_makes_the_same_plan() -> None:
    for overrides in ([], ["zero.preset=topo"], ["zero.preset=mics"], ["zero.stage=2", "quantize.gradients=int4"]):
        made = plan(4, 2, *overrides)
        assert None not in made.record["quantize"].values()
        recipe = parse_recipe(dict(made.record))
        assert check_and_plan(recipe, Facts(world=4, device="cpu", ranks_per_node=2)) == made


def padded(made: Plan) -> int:
    """Return the model's parameters with each unit's padding."""
    return sum(made.sharding.placements[unit.name].padded(unit.numel) for unit in model_units(made.model))


@pytest.mark.parametrize(("per_parameter", "expected"), [(16.5, 1), (13, 2), (8.1, 2), (4.1, 4), (2.1, 8)])
def test_auto_is_the_smallest_that_fits(per_parameter: float, expected: int) -> None:
    parameters = padded(plan(8, 2))
    room = f"{per_parameter * parameters / STATES_SHARE:.0f}B"
    memory = f"cluster={{accelerator: {{memory: {room}}}, node: {{ranks: 2}}}}"
    assert degrees(8, 2, "zero.partition.weights=auto", memory)[:3] == (expected,) * 3
    with pytest.raises(BadInputError, match="do not fit the 8 ranks' memory"):
        degrees(8, 2, "zero.partition.weights=auto", "cluster={accelerator: {memory: 1kB}, node: {ranks: 2}}")


@pytest.mark.parametrize(
    ("per_parameter", "overrides", "expected"),
    [
        # fp32: weights take 4 bytes, gradients 4, the optimizer 8.
        (12.1, "zero.partition.optimizer=auto", (1, 1, 2, 0)),
        (9.1, "zero.partition.optimizer=auto", (1, 1, 8, 0)),
        (6.1, "zero.partition={gradients: auto}", (1, 8, 8, 0)),
        (6.1, "zero.partition={weights: auto, optimizer: 8}", (2, 2, 8, 0)),
        (6.1, "zero.stage=1 zero.partition.gradients=auto", (1, 4, 8, 0)),
        # The second copy takes 4 bytes over 2 ranks.
        (5.1, "zero.partition.weights=auto zero.secondary=2", (8, 8, 8, 2)),
        (6.1, "zero.partition.weights=auto zero.secondary=2", (4, 4, 4, 2)),
    ],
)
def test_auto_counts_what_the_run_will_hold(per_parameter: float, overrides: str, expected: tuple[int, ...]) -> None:
    parameters = padded(plan(8, 2))
    room = f"{per_parameter * parameters / STATES_SHARE:.0f}B"
    memory = f"cluster={{accelerator: {{memory: {room}}}, node: {{ranks: 2}}}}"
    assert degrees(8, 2, *re.split(r" (?=[a-z]+\.)", overrides), memory) == expected
    with pytest.raises(BadInputError, match="do not fit the 8 ranks' memory"):
        degrees(8, 2, "zero.partition.optimizer=auto", memory.replace(room, f"{8 * parameters:.0f}B"))


PARTITION = "zero.partition="
REFUSED = {
    # Not nested.
    f"{PARTITION}{{weights: 4, gradients: 2, optimizer: 8}}": r"gradients is 2; .* zero\.partition\.weights \(4\)",
    f"{PARTITION}{{weights: 2, gradients: 8, optimizer: 4}}": r"optimizer is 4; .* zero\.partition\.gradients \(8\)",
    "zero.stage=1 zero.partition.weights=2": r"gradients is 1; expected a multiple of zero\.partition\.weights \(2\)",
    # Not dividing.
    f"{PARTITION}{{weights: 3}}": r"zero\.partition\.weights is 3; expected a divisor of the 8 data-parallel ranks",
    f"{PARTITION}{{weights: 16}}": r"zero\.partition\.weights is 16; expected a divisor of the 8",
    f"{PARTITION}{{optimizer: 6}}": r"zero\.partition\.optimizer is 6; expected a divisor of the 8",
    f"{PARTITION}{{gradients: auto, optimizer: 6}}": r"zero\.partition\.optimizer is 6; expected a multiple",
    f"{PARTITION}{{weights: 0}}": r"zero\.partition\.weights is 0; expected a whole number from 1 to 131,072 or text",
    f"{PARTITION}{{gradients: -2}}": r"zero\.partition\.gradients is -2",
    # Secondary copies.
    "zero.secondary=2": r"zero\.secondary is 2, but every rank holds all weights; .* zero\.stage=3",
    "zero.stage=2 zero.secondary=node": r"zero\.secondary is 4, but every rank holds all weights",
    "zero.stage=3 zero.secondary=3": r"zero\.secondary is 3; expected a divisor or a multiple of 8",
    "zero.stage=3 zero.secondary=16": r"zero\.secondary is 16; expected",
    "zero.stage=3 zero.secondary=-1": r"zero\.secondary is -1; expected",
    # Quantization of traffic that does not exist.
    "quantize.weights=int8": r"quantize\.weights is int8, but no weights are gathered",
    "zero.stage=3 quantize.secondary=int8": r"quantize\.secondary is int8, but there is no secondary copy",
    "zero.preset=zero++ zero.secondary=0 quantize.secondary=int8": r"quantize\.secondary is int8, but there is no",
    "zero.stage=3 quantize.gradients=int4 quantize.block=33": r"quantize.*block is 33; .* must be even",
    "zero.preset=zero++ quantize.block=33": r"quantize\.block is 33; .* must be even",
    "quantize.block=0": "quantize.block is 0; expected a whole number from 1 to 16,777,216",
    "quantize.weights=int4": r"quantize\.weights is int4",
    "quantize.gradients=int8": r"quantize\.gradients is int8",
    # Presets and stages.
    "zero.preset=mics zero.stage=3": r"zero\.stage is 3, but zero\.preset mics sets it",
    "zero.preset=zero+": r"zero\.preset is zero\+",
    "zero.stage=4": r"zero\.stage is 4",
    "zero.partitions.weights=2": r"zero\.partitions.*zero\.partition",
    # Names of tiers.
    "zero.partition.weights=rack": r"zero\.partition\.weights: rack is no tier of this cluster; expected one of node,",
    "zero.stage=3 zero.secondary=die": r"zero\.secondary: die is no tier",
    "zero.stage=3 zero.secondary=auto": r"zero\.secondary is auto; expected a number of ranks or a tier",
    # Clusters.
    "cluster={node: {ranks: 3}}": r"cluster\.node\.ranks is 3, but the run was started with 4 ranks on each machine",
    "cluster={node: {ranks: 2}, clusters: [{name: a, nodes: 3}]}": r"3 nodes of 2 ranks, but the run has 8",
    "cluster=nowhere": r"nowhere",
    # Everything else that depends on the number of ranks.
    "train.global_batch=12": r"batch is 12; expected a multiple of the 8 data-parallel ranks, such as 8 or 16$",
    "train.global_batch=5": r"train\.global_batch is 5; expected a multiple of the 8 data-parallel ranks, such as 8$",
    "train.microbatch=4": r"train\.microbatch is 4; expected a divisor of 6, the sequences of a data-parallel rank",
    "parallel.data=4": r"parallel\.data is 4, but the run has 8 ranks",
}  # fmt: skip


@pytest.mark.parametrize("overrides", REFUSED)
def test_refused(overrides: str) -> None:
    keys = re.split(r" (?=[a-z]+\.)", overrides)
    with pytest.raises(BadInputError, match=REFUSED[overrides]) as caught:
        plan(8, 4, *keys)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("overrides", ["zero.partition.weights=3", "zero.stage=3 quantize.secondary=int8"])
def test_refused_before_any_process_starts(overrides: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    command = [sys.executable, "-m", "llmtrain", "run", "tiny.yaml", "--nproc", "4", *overrides.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    key, _, value = overrides.split()[-1].partition("=")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert f"{key} is {value}" in done.stderr
    assert sorted(tmp_path.rglob("*")) == before
