"""Mean loss over a fixed set of samples, the same on every layout."""

from collections.abc import Callable, Iterator, Sequence

import torch
from llmtrain_data.dataset import Samples
from torch import Tensor

from llmtrain.cluster.layout import Axis, even_share
from llmtrain.comm.device import to_device, to_host
from llmtrain.comm.ranks import Ranks
from llmtrain.model.gpt import GPT

# Seed of the order of samples: the same for all runs, so that their losses can be compared.
ORDER = 0

# Most microbatches on the device at once.
TOGETHER = 64

# Takes microbatches, int64 `[sequences, tokens + 1]` each. Yields, for some at a time and in order, their number and
# their mean losses; no losses on a rank that does not count them.
LossesOf = Callable[[Sequence[Tensor]], Iterator[tuple[int, list[Tensor]]]]


@torch.no_grad()
def mean_loss(model: GPT, losses_of: LossesOf, samples: Samples, count: int, microbatch: int, ranks: Ranks) -> float:
    """Return the mean loss in nats per token over at most `count` samples, the same ones in every call. Collective.

    The data-parallel ranks share the samples. Fewer samples than the split has come from all of it, because neighbours
    may belong to one document.
    """
    count = min(count, len(samples))
    degree, place = ranks.layout.degree(Axis.DATA), ranks.layout.coordinate(ranks.rank, Axis.DATA)
    start, end = even_share(count, degree, place)
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
