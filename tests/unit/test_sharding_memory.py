"""Bytes of an engine's model states against formulas: padding to a multiple of 32 elements for every rank, and an fp32
scale for each block of a quantized secondary copy. `test_plan_states.py` compares planned bytes with the papers'.
"""

from collections.abc import Iterable

import pytest
import torch
from llmtrain.cluster.layout import Axis
from llmtrain.cluster.levels import Degrees, levels_of
from llmtrain.cluster.tiers import Tier
from llmtrain.model.config import GPTConfig
from llmtrain.model.gpt import GPT
from llmtrain.model.presets import PRESETS
from llmtrain.model.tensors import UnitSpec, model_units, parameter_count
from llmtrain.plan.placement import UNIT_ALIGNMENT, Placement, alignment
from llmtrain.sharding.collectives import Packing
from llmtrain.sharding.engine import Engine, ShardingSpec
from llmtrain.sharding.hops import Hops
from llmtrain.sharding.unit import ShardedUnit, ShardRanges
from llmtrain.sharding.weights import WeightPolicy

from tests.programs import programs_of, whole_model

# Nodes of Frontier, 8 dies each, up to the 384 of ZeRO-topo.
NODES, DIES = (1, 8, 16, 48), 8


def held(units: Iterable[UnitSpec], degrees: Degrees, place: int) -> tuple[int, int, int]:
    """Return the elements of weights, gradients and optimizer states on the rank at `place`."""
    levels = levels_of(degrees, (Tier("die", 2), Tier("node", DIES), Tier("all", degrees.ranks)))
    placement = Placement(axes=(Axis.DATA,), degrees=degrees, levels=levels)
    cuts = [ShardRanges.of(unit.numel, placement, place) for unit in units]
    ranges = ([getattr(cut, state) for cut in cuts] for state in ("weights", "gradients", "optimizer"))
    weights, gradients, optimizer = (sum(end - start for start, end in each) for each in ranges)
    return weights, gradients, optimizer


@pytest.mark.parametrize("nodes", NODES[1:])
def test_padding_of_a_published_model(nodes: int) -> None:
    """GPT-NeoX-20B on 384 dies: padding is at most 32 elements for each unit and rank, 0.003% of the model."""
    config, ranks = PRESETS["gpt-neox-20b"], nodes * DIES
    units, psi = model_units(config), parameter_count(config)
    assert psi == pytest.approx(20.6e9, rel=0.01)
    for degrees in (Degrees(ranks, ranks, ranks, ranks), Degrees(ranks, 2, DIES, ranks)):
        most = len(units) * UNIT_ALIGNMENT * ranks
        assert most < 3e-5 * psi
        for place in (0, 9, ranks - 1):
            for numel, degree in zip(
                held(units, degrees, place), (degrees.weights, degrees.gradients, degrees.optimizer), strict=True
            ):
                assert psi / degree <= numel <= (psi + most) / degree


SMALL = GPTConfig(
    family="neox", layers=3, hidden=48, heads=4, kv_heads=4, ffn=192, positions=16, vocab=101, tie_embeddings=False,
    norm_eps=1e-5, rope_theta=10000.0, rotary_fraction=0.5, activation="gelu", dropout=0.0,
)  # fmt: skip
BLOCK = 128


def built(degrees: Degrees, dtype: torch.dtype, int8_weights: bool, int8_secondary: bool) -> Engine:
    """Return a rank's engine with all its tensors; without gathers, it needs no other ranks."""
    device, packing = torch.device("cpu"), Packing(8, BLOCK)
    model = GPT(SMALL, device)
    levels = levels_of(degrees, (Tier("die", 2), Tier("node", DIES), Tier("all", degrees.ranks)))
    exact = not int8_weights or degrees.optimizer == degrees.weights
    placement = Placement(
        axes=(Axis.DATA,),
        degrees=degrees,
        levels=levels,
        masters="weights" if dtype == torch.float32 and exact else "separate",
        alignment=alignment(BLOCK if int8_weights else 0),
    )
    hops = Hops(placement, degrees.ranks - 1)
    units = [ShardedUnit(spec, model.unit(spec.name), hops, dtype, 0, device) for spec in model_units(SMALL)]
    policy = WeightPolicy(packing if int8_weights else None, packing if int8_secondary else None)
    return Engine(model, units, ShardingSpec(policy), programs_of(units, [whole_model(SMALL)]), lambda calls: None)


def padded(ranks: int, shard: int = UNIT_ALIGNMENT) -> list[int]:
    multiple = shard * ranks if ranks > 1 else 1
    return [-(-unit.numel // multiple) * multiple for unit in model_units(SMALL)]


def int8(numel: int) -> int:
    return numel + 4 * -(-numel // BLOCK)


@pytest.mark.parametrize("ranks", [8, 24])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_units_take_what_the_tables_say(ranks: int, dtype: torch.dtype) -> None:
    """Every byte of every allocated tensor, for each scheme of tables V and VI, with padding."""
    wide, masters = dtype.itemsize, 0 if dtype == torch.float32 else 4
    sizes = padded(ranks)
    psi = sum(sizes)
    assert psi < parameter_count(SMALL) + len(sizes) * UNIT_ALIGNMENT * ranks
    for degrees in (
        Degrees(ranks), Degrees(ranks, 1, 1, ranks), Degrees(ranks, 1, ranks, ranks),
        Degrees(ranks, ranks, ranks, ranks), Degrees(ranks, ranks, ranks, ranks, DIES), Degrees(ranks, 2, DIES, ranks),
    ):  # fmt: skip
        engine = built(degrees, dtype, False, False)
        expected = wide * psi // degrees.weights + 4 * psi // degrees.gradients
        expected += (8 + masters) * psi // degrees.optimizer
        expected += wide * psi // degrees.secondary if degrees.secondary else 0
        assert engine.state_bytes == expected
        engine.close()


@pytest.mark.parametrize("second", [2, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_topo_s_secondary_of_8_bits(second: int, dtype: torch.dtype) -> None:
    """Table V: psi + psi / 8 or psi + psi / 2 bytes of 16-bit weights and their copy, plus the copy's scales."""
    ranks = 16
    degrees, psi = Degrees(ranks, 2, DIES, ranks, second), sum(padded(ranks, BLOCK))
    engine = built(degrees, dtype, True, True)
    held, sizes = engine.weights.secondary_bytes, padded(ranks, BLOCK)
    assert held == sum(int8(size // second) for size in sizes)
    scales = held - psi // second
    assert 0 < scales <= 4 * (psi // second // BLOCK + len(sizes))
    weights = dtype.itemsize * psi // 2 + psi // second + scales
    # Masters are separate even if weights are fp32, because the weights were quantized on their way.
    assert engine.state_bytes == weights + 4 * psi // DIES + 12 * psi // ranks
    engine.close()
