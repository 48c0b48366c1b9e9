"""Mean loss over a fixed set of samples, the same on every layout."""

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from llmtrain_data import units
from llmtrain_data.dataset import Samples
from torch import Tensor

from llmtrain.cluster.layout import Axis, even_share
from llmtrain.comm.device import to_device, to_host
from llmtrain.comm.ranks import Ranks
from llmtrain.launch.stop import StopRequest
from llmtrain.model.gpt import GPT

# Seed of the order of samples: the same for all runs, so that their losses can be compared.
ORDER = 0

# Most microbatches on the device at the same time.
TOGETHER = 64

# Seconds after which ranks ask each other whether one of them was asked to stop.
BETWEEN = 0.5

# Takes microbatches, int64 `[sequences, tokens + 1]` each. Yields, for some at a time and in order, their number and
# their mean losses; no losses on a rank that does not count them.
LossesOf = Callable[[Sequence[Tensor]], Iterator[tuple[int, list[Tensor]]]]


class EvaluationStoppedError(Exception):
    """An evaluation was stopped before its end, on all ranks."""


class InParts:
    """Splits the microbatches of an evaluation into parts of about `BETWEEN` seconds. Between parts, ranks agree
    whether one of them was asked to stop."""

    def __init__(self, ranks: Ranks, stop: StopRequest, least: int) -> None:
        """least: number of microbatches of the smallest part."""
        self._ranks, self._stop = ranks, stop
        self._size = self._least = least
        self._since = 0.0

    def parts(self, batches: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Yield the parts of some microbatches. Collective. Raises EvaluationStoppedError if any rank was asked to
        stop."""
        first = 0
        while first < len(batches):
            if self.stopping():
                raise EvaluationStoppedError
            yield batches[first : first + self._size]
            first += self._size

    def stopping(self) -> bool:
        """Return whether any rank was asked to stop; else set the size of the next part. Collective."""
        stop, now = self._stop, time.perf_counter()
        spent = now - self._since if self._since else BETWEEN
        asked, interrupted, total = self._ranks.sum_all([float(stop.asked), float(stop.interrupted), spent])
        stop.agreed, stop.interrupted = asked > 0, interrupted > 0
        # All ranks have the same sums, and so parts of the same sizes.
        mean = total / self._ranks.layout.world
        if mean > BETWEEN:
            self._size = max(self._least, self._size // 2)
        elif self._since and mean < BETWEEN / 2:
            self._size = min(2 * self._size, TOGETHER)
        self._since = time.perf_counter()
        return stop.agreed


@torch.no_grad()
def mean_loss(model: GPT, losses_of: LossesOf, samples: Samples, count: int, microbatch: int, ranks: Ranks) -> float:
    """Return the mean loss in nats per token over at most `count` samples, the same ones in every call. Collective.

    The data-parallel ranks share the samples. Fewer samples than the split has come from all of it, because neighbours
    may belong to one document.
    """
    count = min(count, len(samples))
    ranks.activity.begin(f"evaluating {units.count(count, 'sample')}")
    degree, data_rank = ranks.layout.degree(Axis.DATA), ranks.layout.coordinate(ranks.rank, Axis.DATA)
    start, end = even_share(count, degree, data_rank)
    # Every rank makes as many passes as the rank with the most samples, because all ranks gather weights together.
    firsts = range(start, start + -(-count // degree), microbatch)
    sizes = [max(min(microbatch, end - first), 0) for first in firsts]
    total, passed, was_training = 0.0, 0, model.training
    model.eval()
    ranks.activity.moving(0.0)
    for at in range(0, len(sizes), TOGETHER):
        some = sizes[at : at + TOGETHER]
        rows = [
            to_device(torch.from_numpy(samples.batch(ORDER, first if size else 0, max(size, 1))), ranks.device)
            for first, size in zip(firsts[at : at + TOGETHER], some, strict=True)
        ]
        losses: list[Tensor] = []
        for count_of, found in losses_of(rows):
            passed, losses = passed + count_of, losses + found
            ranks.activity.moving(passed / len(sizes))
        means = to_host(torch.stack(losses)).tolist() if losses else []
        total += sum(mean * size for mean, size in zip(means, some, strict=False))
    model.train(was_training)
    return ranks.sum_all([total])[0] / count
