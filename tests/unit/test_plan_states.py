"""Planned bytes of model states: those of real engines, and the papers' formulas, line by line."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llmtrain.cluster.layout import Axis
from llmtrain.cluster.levels import Degrees
from llmtrain.model.dtypes import DTYPES
from llmtrain.model.gpt import GPT
from llmtrain.parallel.pipeline.stage import keep
from llmtrain.parallel.tensor.collectives import TensorMesh
from llmtrain.parallel.tensor.parallelize import parallelize
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.memory_budget import memory_budget
from llmtrain.plan.per_rank.roles import roles
from llmtrain.plan.per_rank.states import StateBytes, most_states, role_states, unit_states
from llmtrain.plan.pipeline.stage_layout import units_of
from llmtrain.plan.placement import Placement, alignment
from llmtrain.plan.plan import Plan, Quantization
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.spec import ProgramSpec
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.sharding.collectives import Packing
from llmtrain.sharding.engine import Engine, ShardingSpec
from llmtrain.sharding.hops import Hops
from llmtrain.sharding.unit import ShardedUnit
from llmtrain.sharding.weights import WeightPolicy
from torch import Tensor

PLAIN = Quantization(weights=0, secondary=0, gradients=0, block=256)


def states(psi: int, degrees: Degrees, compute_bytes: int, quantization: Quantization = PLAIN) -> StateBytes:
    masters = "weights" if compute_bytes == 4 else "separate"
    placement = Placement(
        axes=(Axis.DATA,),
        degrees=degrees,
        levels=(),
        masters=masters,  # type: ignore[arg-type]
        alignment=alignment(quantization.block if quantization.weights else 0),
    )
    return unit_states(psi, placement, quantization, compute_bytes)


# A multiple of every padding below, near the 7.5 B parameters of ZeRO's figure 1.
PSI, RANKS = 7_500_000_000 // 2**20 * 2**20, 64
STAGES = {0: (1, 1, 1), 1: (1, 1, RANKS), 2: (1, RANKS, RANKS), 3: (RANKS, RANKS, RANKS)}


@pytest.mark.parametrize("stage", STAGES)
def test_zero_s_16_bytes_for_a_parameter(stage: int) -> None:
    """ZeRO, section 3.1 and figure 1 (the characterization of DeepSpeed, table I): fp16 and Adam, K = 12."""
    ours, (weights, gradients, optimizer) = states(PSI, Degrees(RANKS, *STAGES[stage]), 2), STAGES[stage]
    assert ours.weights == 2 * PSI // weights
    # Theirs are 2 bytes, in fp16. Ours are fp32 sums over microbatches.
    assert ours.gradients == 2 * (2 * PSI // gradients)
    # K = 12: masters, momentum and variance, 4 bytes each.
    assert ours.masters == 4 * PSI // optimizer
    assert ours.moments == 8 * PSI // optimizer
    assert ours.optimizer == 12 * PSI // optimizer
    assert (ours.secondary, ours.replicated) == (0, 0)
    # With gradients as narrow as theirs, the sums are those of the paper.
    theirs = replace(ours, gradients=ours.gradients // 2).total
    n = RANKS
    assert theirs == [16 * PSI, 4 * PSI + 12 * PSI // n, 2 * PSI + 14 * PSI // n, 16 * PSI // n][stage]
    assert round(theirs / 1e9, 1) == [120.0, 31.4, 16.6, 1.9][stage]
    assert ours.total - theirs == 2 * PSI // gradients


@pytest.mark.parametrize("stage", STAGES)
def test_fp32_has_no_masters_of_its_own(stage: int) -> None:
    weights, gradients, optimizer = STAGES[stage]
    ours = states(PSI, Degrees(RANKS, *STAGES[stage]), 4)
    expected = StateBytes(weights=4 * PSI // weights, gradients=4 * PSI // gradients, moments=8 * PSI // optimizer)
    assert ours == expected


def test_axonn_s_4_bytes_for_a_parameter() -> None:
    """AxoNN, section V: 16-bit weights and gradients, and the buckets that the device steps. It counts 16 bytes of an
    element of one bucket; our kernel reads the 16-bit gradients, and each slot has one bucket of 12."""
    keys = ("precision.compute=fp16", "offload={optimizer: host, step: device, share: 1, bucket: 1024, spare: 0}")
    devices = []
    for gradients in ("compute", "fp32"):
        recipe = load_recipe("tiny.yaml", (*keys, f"precision.gradients={gradients}", "offload.overlap=2"))
        row = memory_budget(make_plan(recipe, Facts(world=1, device="cuda"))).fullest
        devices.append(row.device)
    psi, slots, bucket = row.role.parameters, 3, 1024
    narrow, wide = (
        sum(device[name] for name in ("weights", "gradients", "optimizer", "offload_slots")) for device in devices
    )
    assert narrow == 4 * psi + 12 * slots * bucket
    assert wide == 6 * psi + 12 * slots * bucket


@pytest.mark.parametrize("nodes", [1, 8, 16, 48])
def test_tables_v_and_vi_of_zero_topo(nodes: int) -> None:
    """Weights (V) and gradients (VI) per die, on nodes of P = 8 dies, up to the paper's 384. Their optimizer states
    are sharded over all ranks in every scheme."""
    ranks, psi = nodes * 8, 48 * 2**24
    eight = replace(PLAIN, secondary=8)
    topo = {second: states(psi, Degrees(ranks, 2, 8, ranks, second), 2, eight) for second in (8, 2)}
    zero3 = states(psi, Degrees(ranks, ranks, ranks, ranks), 2)
    zeropp = states(psi, Degrees(ranks, ranks, ranks, ranks, 8), 2)
    # Table V. Theirs counts no scales; ours has an fp32 scale for each block of 256 elements.
    assert zero3.weights + zero3.secondary == 2 * psi // ranks
    assert zeropp.weights + zeropp.secondary == 2 * psi // ranks + 2 * psi // 8
    for second, ours in topo.items():
        scales = 4 * psi // second // 256
        assert ours.weights == 2 * psi // 2
        assert ours.secondary == psi // second + scales
    # Table VI. Theirs are 2 bytes, in fp16. Ours are fp32 sums over microbatches.
    assert zero3.gradients == zeropp.gradients == 2 * (2 * psi // ranks)
    assert topo[8].gradients == topo[2].gradients == 2 * (2 * psi // 8)
    assert {ours.optimizer for ours in (zero3, zeropp, *topo.values())} == {12 * psi // ranks}


RECIPE = """
model: {family: neox, layers: 3, hidden: 48, heads: 4, ffn: 192, vocab: 101, rotary_fraction: 0.5}
data: {path: set, sequence_length: 16}
train: {global_batch: 96}
"""
INT8, SECOND, INT4 = "quantize.weights=int8", "quantize.secondary=int8", "quantize.gradients=int4"
STRATEGIES = {
    "plain": (),
    "stage1": ("zero.stage=1",),
    "stage2": ("zero.stage=2",),
    "stage3": ("zero.stage=3",),
    "mics": ("zero.preset=mics",),
    "zero++": ("zero.preset=zero++",),
    "topo": ("zero.preset=topo",),
    "partition": ("zero.partition={weights: 2, gradients: 4, optimizer: 4}",),
    "stage1-int8": ("zero.stage=1", INT8),
    "secondary": ("zero.stage=3", "zero.secondary=2"),
    "secondary-int8": ("zero.stage=3", "zero.secondary=2", SECOND),
    "secondary-more": ("zero.stage=3", "zero.secondary=2", INT8, SECOND, INT4, "quantize.block=64"),
}
GRIDS = {
    "data": ("parallel.data=4",),
    "tensor": ("parallel.data=4", "parallel.tensor=2"),
    "pipeline": ("parallel.data=4", "parallel.pipeline=2"),
    "tied": ("parallel.data=4", "parallel.tensor=2", "parallel.pipeline=2", "model.tie_embeddings=true"),
    "chunks": ("parallel.data=4", "parallel.pipeline=2", "pipeline.schedule=zero-bubble-v", "model.layers=5"),
}


@pytest.fixture(autouse=True)
def _in_folder_with_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(RECIPE)


def plan(*overrides: str) -> Plan:
    degrees = dict(key.removeprefix("parallel.").split("=") for key in overrides if key.startswith("parallel."))
    world = int(degrees["data"]) * int(degrees.get("tensor", 1)) * int(degrees.get("pipeline", 1))
    # Two places of the data axis are in each node.
    facts = Facts(world=world, device="cpu", ranks_per_node=2 * int(degrees.get("tensor", 1)))
    return make_plan(load_recipe("tiny.yaml", overrides), facts)


def engine(made: Plan, rank: int) -> Engine:
    """Return a rank's engine with all its tensors; without gathers, it needs no other ranks."""
    device, grid, quantization = torch.device("cpu"), made.grid, made.sharding.quantization
    model = GPT(made.model, device)
    keep(model, made.stages_of(rank))
    mesh = TensorMesh(grid.coordinate(rank, Axis.TENSOR), grid.degree(Axis.TENSOR))
    parallelize(model, mesh)
    hops: dict[Placement, Hops] = {}
    units = []
    for spec in units_of(made.model, made.stages_of(rank), mesh.tensor_rank, mesh.degree):
        placement = made.sharding.placements[spec.name]
        own = hops.setdefault(placement, Hops(placement, grid.coordinate(rank, *placement.axes)))
        units.append(ShardedUnit(spec, model.unit(spec.name), own, DTYPES[made.compute], 0, device))
    packing, secondary = (
        Packing(bits, quantization.block) if bits else None for bits in (quantization.weights, quantization.secondary)
    )
    policy = WeightPolicy(packing, secondary, tensor_parallel=mesh.degree > 1)
    return Engine(model, units, ShardingSpec(policy), Programs(ProgramSpec.of(made, rank)), lambda calls: None)


def layouts() -> Iterator[tuple[str, ...]]:
    for compute in ("fp32", "bf16"):
        for name in STRATEGIES:
            yield "data", name, compute, "fp32"
    for grid in GRIDS:
        for name in ("plain", "stage3", "topo", "stage1-int8"):
            yield grid, name, "bf16", "fp32"
        for name in ("plain", "topo"):
            yield grid, name, "bf16", "compute"


def masters_of(unit: ShardedUnit) -> Tensor:
    return unit.optimizer.read("master", *unit.ranges.optimizer)


@pytest.mark.parametrize(("grid", "strategy", "compute", "gradients"), list(dict.fromkeys(layouts())))
def test_engines_hold_what_is_planned(grid: str, strategy: str, compute: str, gradients: str) -> None:
    """Every rank's engine, byte by byte. Each rank has one role."""
    keys = (f"precision.compute={compute}", f"precision.gradients={gradients}")
    made = plan(*GRIDS[grid], *STRATEGIES[strategy], *keys)
    held: dict[tuple[int, int], list[StateBytes]] = {}
    for rank in range(made.grid.world):
        built = engine(made, rank)
        units = built.units.values()
        apart = [unit for unit in units if unit.hops.placement.masters == "separate"]
        found = StateBytes(
            weights=sum(unit.weight.nbytes for unit in units),
            gradients=sum(unit.gradient.nbytes for unit in units),
            masters=sum(masters_of(unit).nbytes for unit in apart),
            moments=sum(unit.optimizer.nbytes - masters_of(unit).nbytes for unit in units),
            secondary=built.weights.secondary_bytes,
            replicated=built.weights.replicated_bytes,
        )
        assert found.total == built.state_bytes
        numel = sum(unit.spec.numel for unit in units)
        held.setdefault((made.grid.coordinate(rank, Axis.PIPELINE), numel), []).append(found)
        built.close()
    planned = {(role.pipeline, role.parameters): [role_states(made, role)] * role.ranks for role in roles(made)}
    assert held == planned
    assert most_states(made).total == max(found.total for group in held.values() for found in group)


def test_what_the_cases_cover() -> None:
    """The cases above are not all alike: packed copies, values kept apart, slices and stages that differ."""
    topo = plan(*GRIDS["tied"], *STRATEGIES["topo"], "precision.compute=bf16")
    found = [role_states(topo, role) for role in roles(topo)]
    assert all(one.secondary and one.replicated and one.masters for one in found)
    assert [(role.rank, role.ranks) for role in roles(topo)] == [(0, 4), (1, 4), (8, 4), (9, 4)]
    # The slices of the vocabulary have 50 or 51 rows; stages without it are alike on all tensor-parallel ranks.
    middle = plan("parallel.data=2", "parallel.tensor=2", "parallel.pipeline=3")
    assert [(role.pipeline, role.ranks) for role in roles(middle)] == [(0, 2), (0, 2), (1, 4), (2, 2), (2, 2)]
    alone = plan("parallel.data=1", "parallel.tensor=2")
    smaller, larger = (role_states(alone, role).total for role in roles(alone))
    assert smaller < larger
