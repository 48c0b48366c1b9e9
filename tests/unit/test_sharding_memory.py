"""Bytes of model states per rank, against ZeRO's formulas and ZeRO-topo's tables V and VI.

ZeRO (section 5) counts 2 bytes of weights, 2 of gradients and K = 12 of optimizer states for each of psi parameters.
Ours differ from both papers in one place: gradients are fp32 sums of 4 bytes, where the papers keep 2, so a rank holds
2 psi / N_g bytes more for gradients over N_g ranks. In addition, each unit is padded to a multiple of 32 elements for
every rank, and a quantized secondary copy has an fp32 scale for each block.
"""

from collections.abc import Iterable
from itertools import product

import pytest
import torch
from llmtrain.cluster.layout import Axis
from llmtrain.cluster.levels import Degrees, levels_of
from llmtrain.cluster.tiers import Tier
from llmtrain.model.config import GPTConfig
from llmtrain.model.gpt import GPT
from llmtrain.model.presets import PRESETS
from llmtrain.model.tensors import UnitSpec, model_units, parameter_count
from llmtrain.plan.placement import ALIGNMENT, Placement, alignment
from llmtrain.sharding.collectives import Packing
from llmtrain.sharding.engine import Engine, ShardingSpec
from llmtrain.sharding.hops import Hops
from llmtrain.sharding.unit import ShardedUnit, ShardRanges
from llmtrain.sharding.weights import WeightPolicy

GB, BF16, FP32 = 10**9, 2, 4
# ZeRO-topo's sizes (figures 7 and 8), and nodes of Frontier, 8 dies each, up to its 384.
PSI, NODES, DIES = (10 * GB, 20 * GB), (1, 8, 16, 48), 8


def test_zero_s_formulas() -> None:
    """Figure 1 of ZeRO: 7.5 B parameters over 64 ranks take 120, 31.4, 16.6 and 1.9 GB."""
    psi, ranks = 7_500_000_000, 64
    stages = [(1, 1, 1), (1, 1, ranks), (1, ranks, ranks), (ranks, ranks, ranks)]
    for stage, stated in zip(stages, (120, 31.4, 16.6, 1.9), strict=True):
        degrees = Degrees(ranks, *stage)
        wider_sums = 2 * psi // degrees.gradients
        assert round((degrees.state_bytes(psi, BF16) - wider_sums) / GB, 1) == stated
    # In fp32 the weights are the masters: 4 bytes of weights, of gradients, and of two moments each.
    assert [Degrees(ranks, *stage).state_bytes(psi, FP32) for stage in stages] == [
        16 * psi, 8 * psi + 8 * psi // ranks, 4 * psi + 12 * psi // ranks, 16 * psi // ranks,
    ]  # fmt: skip


@pytest.mark.parametrize(("psi", "nodes"), list(product(PSI, NODES)))
def test_tables_v_and_vi(psi: int, nodes: int) -> None:
    """Weights (V) and gradients (VI, twice as wide here). Optimizer states are cut over all ranks in each scheme.

    Table V's secondary copy of 8 bits is not in `state_bytes`, which counts one in the compute dtype as ZeRO++ has it.
    """
    ranks = nodes * DIES
    optimizer, wider = 12 * psi / ranks, 2
    schemes = {
        Degrees(ranks, ranks, ranks, ranks): (2 * psi / ranks, 2 * psi / ranks),
        Degrees(ranks, ranks, ranks, ranks, DIES): (2 * psi / ranks + 2 * psi / DIES, 2 * psi / ranks),
        Degrees(ranks, 2, DIES, ranks): (2 * psi / 2, 2 * psi / 8),
    }
    for degrees, (weights, gradients) in schemes.items():
        # Each state's bytes are rounded down.
        assert degrees.state_bytes(psi, BF16) == pytest.approx(weights + wider * gradients + optimizer, abs=4, rel=0)


def held(units: Iterable[UnitSpec], degrees: Degrees, place: int) -> tuple[int, int, int]:
    """Return the elements of weights, gradients and optimizer states on the rank at `place`."""
    levels = levels_of(degrees, (Tier("die", 2), Tier("node", DIES), Tier("all", degrees.ranks)))
    placement = Placement(axes=(Axis.DATA,), degrees=degrees, levels=levels)
    cuts = [ShardRanges.of(unit.numel, placement, place) for unit in units]
    ranges = ([getattr(cut, state) for cut in cuts] for state in ("weights", "gradients", "optimizer"))
    return tuple(sum(end - start for start, end in each) for each in ranges)  # type: ignore[return-value]


@pytest.mark.parametrize("nodes", NODES[1:])
def test_padding_of_a_published_model(nodes: int) -> None:
    """GPT-NeoX-20B on 384 dies: padding is at most 32 elements for each unit and rank, 0.003% of the model."""
    config, ranks = PRESETS["gpt-neox-20b"], nodes * DIES
    units, psi = model_units(config), parameter_count(config)
    assert psi == pytest.approx(20.6e9, rel=0.01)
    for degrees in (Degrees(ranks, ranks, ranks, ranks), Degrees(ranks, 2, DIES, ranks)):
        most = len(units) * ALIGNMENT * ranks
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
    return Engine(model, units, ShardingSpec(policy), {}, lambda calls: None)


def padded(ranks: int, shard: int = ALIGNMENT) -> list[int]:
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
    assert psi < parameter_count(SMALL) + len(sizes) * ALIGNMENT * ranks
    for degrees in (
        Degrees(ranks), Degrees(ranks, 1, 1, ranks), Degrees(ranks, 1, ranks, ranks),
        Degrees(ranks, ranks, ranks, ranks), Degrees(ranks, ranks, ranks, ranks, DIES), Degrees(ranks, 2, DIES, ranks),
    ):  # fmt: skip
        engine = built(degrees, dtype, False, False)
        expected = wide * psi // degrees.weights + 4 * psi // degrees.gradients
        expected += (8 + masters) * psi // degrees.optimizer
        expected += wide * psi // degrees.secondary if degrees.secondary else 0
        assert engine.state_bytes == expected == degrees.state_bytes(psi, wide)
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
