"""Tensor-parallel ranks compute what one process computes: each case against the plain model, at 2 and at 4 ranks."""

from collections.abc import Callable

import pytest

from tests.ranks.forks import answers_by_world
from tests.ranks.tensor_cases import BATCH, CASES, SEQUENCE, VARIANTS, Figures, config_of
from tests.ranks.tensor_memory import block_bytes

KINDS, EACH = ("tensor", "sequence"), [(world, name) for world, names in CASES.items() for name in names]
# By rank: the figure's name, and its value.
Found = Callable[[int], list[dict[str, Figures]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return answers_by_world("tensor_ranks.py", tmp_path_factory)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world", "name"), EACH)
def test_parity(world: int, name: str, kind: str, found: Found) -> None:
    """Logits, gradients, losses and weights of several steps in fp32; the ranks share 61 tokens unevenly."""
    for rank in found(world):
        figures = rank[f"{name} {kind}"]
        for variant in VARIANTS:
            assert figures[f"gradients {variant}"] < 1e-5
        assert figures["logits"] < 1e-5
        for optimizer in ("sgd", "adamw"):
            assert figures[f"falls {optimizer}"] > 0.3
            assert figures[f"losses {optimizer}"] < 1e-5
            assert figures[f"weights {optimizer}"] < 1e-5


@pytest.mark.parametrize("name", CASES[2])
def test_weight_gradients_are_deferred(name: str, found: Found) -> None:
    """The backward pass defers the gradients of a block's matrices and of its column-parallel layers' biases."""
    config = config_of(name)
    a_block = 4 if config.family == "llama" else 6
    assert {rank[f"{name} tensor"]["deferred"] for rank in found(2)} == {config.layers * a_block}


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind: str, found: Found) -> None:
    assert all(rank[f"half_precision {kind}"]["bf16 losses"] < 0.01 for rank in found(2))


@pytest.mark.parametrize("kind", KINDS)
def test_dropout(kind: str, found: Found) -> None:
    """Ranks that hold the same tokens drop the same elements of them; each rank drops independently in its own
    heads."""
    first, second = (rank[f"dropout {kind}"] for rank in found(2))
    assert first["recomputed alike"] == second["recomputed alike"] == 0.0
    assert first["in heads"] != second["in heads"]
    assert (first["residual"] == second["residual"]) == (kind == "tensor")
    assert (first["replicated"] == second["replicated"]) == (kind == "tensor")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world", "name"), EACH)
def test_kept_activations(world: int, name: str, kind: str, found: Found) -> None:
    """The last rank saves as many bytes of a block as the formula gives, exactly."""
    figures = found(world)[-1][f"memory {kind}"]
    measured = (figures[f"kept {name} 3"] - figures[f"kept {name} 1"]) / 2
    assert measured == block_bytes(config_of(name), BATCH, SEQUENCE, world, kind == "sequence")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", CASES)
def test_traffic(world: int, kind: str, found: Found) -> None:
    """Each end of a product, also of the vocabulary's, takes one all-reduce, or an all-gather and a reduce-scatter."""
    size = 4 * BATCH * SEQUENCE * config_of("gpt2").hidden
    part = size // world * (world - 1)
    if kind == "tensor":
        # Embedding, attention and MLP in the forward pass; MLP, attention and the head in the backward pass. They are
        # small, so each rank sends its entire part of the sum to the others.
        expected = [f"all_reduce {size} {world * part}"] * 6
    else:
        # Forward: 3 of each. Backward: one more gather of each column-parallel product's inputs, which are saved
        # sharded.
        expected = [f"all_gather {size} {part}"] * 8 + [f"reduce_scatter {size} {part}"] * 6
    for rank in found(world):
        assert sorted(rank[f"traffic {kind}"]["calls"]) == expected
