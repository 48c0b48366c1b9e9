"""Canonical tensors, flat units and their initialisation."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llmtrain.model.config import Family, GPTConfig
from llmtrain.model.gpt import GPT
from llmtrain.model.init import initialize
from llmtrain.model.tensors import TensorSpec, UnitSpec, model_units, parameter_count
from llmtrain.sharding.engine import Engine, ShardingSpec
from llmtrain.sharding.gradients import BackwardPass
from llmtrain.sharding.unit import whole_unit

TINY = GPTConfig(
    family="gpt2",
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=4,
    ffn=64,
    positions=8,
    vocab=32,
    tie_embeddings=True,
    norm_eps=1e-5,
    rope_theta=10000.0,
    rotary_fraction=1.0,
    activation="gelu_tanh",
    dropout=0.0,
)


def tiny(family: Family, tied: bool) -> GPTConfig:
    llama = {"kv_heads": 2, "activation": "swiglu"} if family == "llama" else {}
    return replace(TINY, family=family, tie_embeddings=tied, **llama)  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama", "neox"])
def test_units_hold_exactly_the_parameters(family: Family, tied: bool) -> None:
    config = tiny(family, tied)
    model = GPT(config, torch.device("cpu"))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    rows: dict[str, int] = {}
    for unit in model_units(config):
        for tensor in unit.tensors:
            name = f"{unit.name}.{tensor.parameter}"
            rows[name] = rows.get(name, 0) + tensor.shape[0]
            assert tensor.shape[1:] == shapes[name][1:]
    assert rows == {name: shape[0] for name, shape in shapes.items()}
    assert parameter_count(config) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox"])
def test_weight_decay_covers_matrices_only(family: Family) -> None:
    for unit in model_units(tiny(family, tied=False)):
        matrices = [tensor for tensor in unit.tensors if len(tensor.shape) == 2]
        assert list(unit.tensors[: len(matrices)]) == matrices
        assert unit.decayed == sum(tensor.numel for tensor in matrices)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.data())
def test_pieces_cover_any_range(sizes: list[int], data: st.DataObject) -> None:
    unit = UnitSpec("u", tuple(TensorSpec(str(i), str(i), (size,), decay=False) for i, size in enumerate(sizes)))
    start = data.draw(st.integers(0, unit.numel))
    end = data.draw(st.integers(start, unit.numel))
    covered = [
        unit.offsets[unit.tensors.index(tensor)] + place
        for tensor, first, last in unit.tensor_ranges(start, end)
        for place in range(first, last)
    ]
    assert covered == list(range(start, end))


def test_initialisation_does_not_depend_on_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtrain.model.init.BLOCK", 100)
    unit = model_units(TINY)[1]
    whole = torch.empty(unit.numel)
    initialize(unit, 0, unit.numel, 7, whole)
    for start, end in ((0, 10), (95, 305), (1000, unit.numel)):
        part = torch.empty(end - start)
        initialize(unit, start, end, 7, part)
        assert torch.equal(part, whole[start:end])
    assert whole[:256].std().item() == pytest.approx(0.02, rel=0.15)
    other = torch.empty(unit.numel)
    initialize(unit, 0, unit.numel, 8, other)
    assert not torch.equal(whole, other)


def test_parameters_are_views_of_the_flat_buffers() -> None:
    config = tiny("llama", tied=True)
    model = GPT(config, torch.device("cpu"))
    units = [whole_unit(u, model.unit(u.name), torch.device("cpu"), torch.float32, 0) for u in model_units(config)]
    tokens = torch.randint(0, config.vocab, (2, 9))
    engine, block, sums = Engine(model, units, ShardingSpec(), {}, lambda calls: None), units[1], []
    for first, last in ((True, True), (False, True), (True, False), (False, False), (False, True)):
        turns = [BackwardPass(name, first, last) for name in engine.units]
        engine.backward(model(tokens[:, :-1], tokens[:, 1:]).backward, turns)
        sums.append(block.gradient.clone())
    assert sums[0].any()
    for times, found in zip((2, 1, 2, 3), sums[1:], strict=True):
        torch.testing.assert_close(found, times * sums[0])
    block.master.zero_()
    assert not model.blocks["0"].mlp.down.weight.any()


def test_parameter_without_gradient_is_an_error() -> None:
    model = GPT(TINY, torch.device("cpu"))
    units = [whole_unit(u, model.unit(u.name), torch.device("cpu"), torch.float32, 0) for u in model_units(TINY)]
    engine = Engine(model, units, ShardingSpec(), {}, lambda calls: None)
    loss = model.embedding(torch.zeros((1, 4), dtype=torch.long)).sum()
    with pytest.raises(RuntimeError, match="without a gradient in blocks"):
        engine.backward(loss.backward, [BackwardPass(name, first=True, last=True) for name in engine.units])
