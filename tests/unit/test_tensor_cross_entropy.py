"""The loss over a sharded vocabulary, with ranks in threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import pytest
import torch
from llmtrain.cluster.layout import even_share
from llmtrain.parallel.tensor.collectives import Pending, TensorMesh
from llmtrain.parallel.tensor.cross_entropy import parallel_cross_entropy
from llmtrain_kernels.cross_entropy import chunks
from llmtrain_kernels.cross_entropy.op import reference_linear_cross_entropy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BATCH, SEQUENCE, HIDDEN = 3, 16, 8


class Board:
    """Where ranks in threads exchange tensors."""

    def __init__(self, ranks: int) -> None:
        self.given: list[Any] = [None] * ranks
        self.barrier = Barrier(ranks, timeout=60)


@dataclass(frozen=True, kw_only=True)
class Threads(TensorMesh):
    """Ranks in threads, which wait for each other in `wait`."""

    board: Board = field(default_factory=lambda: Board(1))

    def all_reduce(self, x: Tensor) -> Pending:
        return Pending(lambda: x.copy_(torch.stack(self._exchange(x)).sum(0)))

    def all_gather(self, x: Tensor) -> Pending:
        return Pending(lambda: torch.cat(self._exchange(x)))

    def reduce_scatter(self, x: Tensor) -> Pending:
        return Pending(lambda: torch.stack(self._exchange(x)).sum(0).chunk(self.degree)[self.tensor_rank])

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self.board.given[self.tensor_rank] = x.clone()
        self.board.barrier.wait()
        given = list(self.board.given)
        self.board.barrier.wait()
        return given


def on_ranks(ranks: int, sequence: bool, work: Callable[[TensorMesh], Any]) -> list[Any]:
    board = Board(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda place: work(Threads(place, ranks, None, sequence, board=board)), range(ranks)))


def given(vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, generator=random).to(dtype)
    weight = torch.randn(vocab, HIDDEN, generator=random).to(dtype)
    return x, weight, torch.randint(0, vocab, (BATCH, SEQUENCE), generator=random)


def own_loss(mesh: TensorMesh, x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank's loss and its gradients for x and its rows of the weight."""
    start, end = even_share(len(weight), mesh.degree, mesh.tensor_rank)
    own = (x.chunk(mesh.degree, dim=1)[mesh.tensor_rank] if mesh.sharded else x).clone().requires_grad_()
    rows = weight[start:end].clone().requires_grad_()
    with torch.enable_grad():  # This is a setting of each thread.
        loss = parallel_cross_entropy(own, rows, targets, mesh, len(weight))
        (loss * 3).backward()
    assert own.grad is not None
    assert rows.grad is not None
    return loss.detach(), own.grad, rows.grad


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("ranks", "rows"), [(2, 256), (2, 10), (4, 8), (4, 15), (4, 1)])
def test_matches_the_whole(ranks: int, rows: int, sequence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """61 tokens over 2 and 4 ranks, in chunks that do not divide the 48 rows, against the plain form."""
    monkeypatch.setattr(chunks, "MIN_ROWS", rows)
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", {"cpu": 0})
    x, weight, targets = given(61)
    whole_x, whole_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = reference_linear_cross_entropy(whole_x.flatten(0, 1), whole_weight, targets.flatten())
    (expected * 3).backward()
    found = on_ranks(ranks, sequence, lambda mesh: own_loss(mesh, x, weight, targets))
    for loss, _, _ in found:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
        assert loss == found[0][0]
    grad_weight = torch.cat([grad for _, _, grad in found])
    torch.testing.assert_close(grad_weight, whole_weight.grad, rtol=1e-5, atol=1e-6)
    if sequence:
        grad_x = torch.cat([grad for _, grad, _ in found], dim=1)
    else:
        grad_x = found[0][1]
        assert all(torch.equal(grad, grad_x) for _, grad, _ in found)
    torch.testing.assert_close(grad_x, whole_x.grad, rtol=1e-5, atol=1e-6)


def test_large_logits() -> None:
    """One rank's logits far above another's neither overflow nor vanish."""
    x, weight, targets = given(61)
    weight[40:] *= 1000
    expected = reference_linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten())
    for loss, *grads in on_ranks(2, False, lambda mesh: own_loss(mesh, x, weight, targets)):
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("sequence", [False, True])
def test_half_precision(sequence: bool) -> None:
    x, weight, targets = given(61, torch.bfloat16)
    expected = reference_linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten())
    for loss, *grads in on_ranks(2, sequence, lambda mesh: own_loss(mesh, x, weight, targets)):
        torch.testing.assert_close(loss, expected, rtol=0.01, atol=0)
        assert {grad.dtype for grad in grads} == {torch.bfloat16}


class Largest(TorchDispatchMode):
    """Records the largest number of elements of any operation's result."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_logits_of_all_tokens(ranks: int, sequence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor has all tokens' logits, not even of a rank's own vocabulary: a chunk's are the largest."""
    rows, vocab = 4, 2003
    monkeypatch.setattr(chunks, "MIN_ROWS", rows)
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", {"cpu": 0})
    x, weight, targets = given(vocab)

    def largest(mesh: TensorMesh) -> int:
        with Largest() as mode:
            own_loss(mesh, x, weight, targets)
        return mode.elements

    share = -(-vocab // ranks)
    assert BATCH * SEQUENCE * (vocab // ranks) > 4 * share * HIDDEN
    # This test's full copy of the weight is smaller than its slice of logits.
    assert all(size <= share * max(rows, HIDDEN) for size in on_ranks(ranks, sequence, largest))
