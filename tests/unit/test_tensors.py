"""Canonical tensors, flat units and their initialisation."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llmtrain.model.config import Family, GPTConfig
from llmtrain.model.gpt import GPT
from llmtrain.model.init import initialize
from llmtrain.model.presets import PRESETS
from llmtrain.model.tensors import TensorSpec, UnitSpec, model_units, parameter_count
from llmtrain.plan.pipeline.schedules import one_forward_one_backward
from llmtrain.sharding.engine import Engine, ShardingSpec
from llmtrain.sharding.unit import unsharded_unit

from tests.programs import BACKWARD, programs_of, whole_model

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
        decayed = [unit.tensor_ranges(start, end) for start, end, decays in unit.decay_ranges if decays]
        assert [tensor for part in decayed for tensor, _, _ in part] == matrices
        assert [start for start, _, _ in unit.decay_ranges[1:]] == [end for _, end, _ in unit.decay_ranges[:-1]]
        assert (unit.decay_ranges[0][0], unit.decay_ranges[-1][1]) == (0, unit.numel)


def test_tensors_that_are_cut_come_first() -> None:
    """A decayed matrix on every rank (a router) beside a sharded bias."""
    router = TensorSpec(name="router", parameter="router", shape=(4, 8), decay=True)
    bias = TensorSpec(name="bias", parameter="bias", shape=(16,), decay=False, split=True)
    weight = TensorSpec(name="weight", parameter="weight", shape=(16, 8), decay=True, split=True)
    norm = TensorSpec(name="norm", parameter="norm", shape=(8,), decay=False)
    with pytest.raises(ValueError, match="put them first"):
        UnitSpec("block", (weight, router, bias, norm))
    unit = UnitSpec("block", (weight, bias, router, norm))
    assert unit.replicated_from == 16 * 8 + 16
    assert unit.decay_ranges == [(0, 128, True), (128, 144, False), (144, 176, True), (176, 184, False)]
    share = unit.slice(1, 2)
    assert share.replicated_from == 72
    assert share.decay_ranges == [(0, 64, True), (64, 72, False), (72, 104, True), (104, 112, False)]


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.data())
def test_pieces_cover_any_range(sizes: list[int], data: st.DataObject) -> None:
    unit = UnitSpec(
        "u",
        tuple(TensorSpec(name=str(i), parameter=str(i), shape=(size,), decay=False) for i, size in enumerate(sizes)),
    )
    start = data.draw(st.integers(0, unit.numel))
    end = data.draw(st.integers(start, unit.numel))
    covered = [
        unit.offsets[unit.tensors.index(tensor)] + place
        for tensor, first, last in unit.tensor_ranges(start, end)
        for place in range(first, last)
    ]
    assert covered == list(range(start, end))


def test_initialisation_does_not_depend_on_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtrain.model.init.RANDOM_BLOCK", 100)
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


@pytest.mark.parametrize(
    ("preset", "inner", "residual"),
    [
        ("gpt2-124m", 0.02, 0.02 / 24**0.5),
        ("llama3.2-1b", 0.02, 0.02 / 32**0.5),
        ("pythia-160m", 0.0228, 0.00601),
        ("gpt-neox-20b", 0.00807, 0.000580),
    ],
)
def test_initial_deviations(preset: str, inner: float, residual: float) -> None:
    """neox: `small_init` and `wang_init` of the published configurations."""
    for tensor in (tensor for unit in model_units(PRESETS[preset]) for tensor in unit.tensors if tensor.decay):
        adds = tensor.name.endswith(("attention.out.weight", "mlp.down.weight"))
        assert tensor.std == pytest.approx(residual if adds else inner, rel=1e-2)


@pytest.mark.parametrize(("family", "dropped"), [("gpt2", True), ("neox", True), ("llama", False)])
def test_dropout_after_the_embedding(family: Family, dropped: bool) -> None:
    """GPT-2 and GPT-NeoX drop elements there. Llama was published without dropout."""
    embedding = GPT(replace(tiny(family, tied=False), dropout=0.5), torch.device("cpu")).embedding
    for name, parameter in embedding.named_parameters():
        setattr(embedding, name, torch.nn.Parameter(torch.ones(parameter.shape)))
    assert bool((embedding(torch.zeros(2, 8, dtype=torch.int64)) == 0).any()) == dropped


def test_parameters_are_views_of_the_flat_buffers() -> None:
    config = tiny("llama", tied=True)
    model = GPT(config, torch.device("cpu"))
    units = [unsharded_unit(u, model.unit(u.name), torch.device("cpu"), torch.float32, 0) for u in model_units(config)]
    tokens = torch.randint(0, config.vocab, (2, 9))
    actions = one_forward_one_backward(1, 3).actions[0]
    programs = programs_of(units, [whole_model(config)], actions)
    engine, block, sums = Engine(model, units, ShardingSpec(), programs, lambda calls: None), units[1], []
    for _ in range(2):
        with engine.training_pass():
            for forward, backward in zip(actions[::2], actions[1::2], strict=True):
                loss = engine.forward(forward, lambda: model(tokens[:, :-1], tokens[:, 1:]))
                engine.backward(backward, loss.backward)
                sums.append(block.gradient.clone())
    assert sums[0].any()
    for times, found in zip((2, 3, 1, 2, 3), sums[1:], strict=True):
        torch.testing.assert_close(found, times * sums[0])
    block.optimizer.write("master", 0, torch.zeros(block.spec.numel))
    assert not model.get_parameter("blocks.0.mlp.down.weight").any()


def test_parameter_without_gradient_is_an_error() -> None:
    model = GPT(TINY, torch.device("cpu"))
    units = [unsharded_unit(u, model.unit(u.name), torch.device("cpu"), torch.float32, 0) for u in model_units(TINY)]
    engine = Engine(model, units, ShardingSpec(), programs_of(units, [whole_model(TINY)]), lambda calls: None)
    loss = model.embedding(torch.zeros((1, 4), dtype=torch.long)).sum()
    with pytest.raises(RuntimeError, match="without a gradient in blocks"):
        engine.backward(BACKWARD, loss.backward)
