"""Mean loss over a fixed set of samples, the same on every layout."""

from collections.abc import Callable, Iterator, Sequence

import torch
from llmtrain_data.dataset import Samples
from torch import Tensor

from llmtrain.cluster.layout import Axis, even_share
from llmtrain.comm.ranks import Ranks
from llmtrain.model.gpt import GPT

# Seed of the order in which samples are evaluated: one for every run, so that their losses compare.
ORDER = 0

# Microbatches that are on the device at once.
TOGETHER = 64

# Yields, some microbatches (int64 `[sequences, tokens + 1]` each) at a time and in their order, how many they were and
# their mean losses; none on a rank that is to count no loss.
LossesOf = Callable[[Sequence[Tensor]], Iterator[tuple[int, list[Tensor]]]]


@torch.no_grad()
def mean_loss(model: GPT, losses_of: LossesOf, samples: Samples, count: int, microbatch: int, ranks: Ranks) -> float:
    """Return the mean loss in nats per token over `count` samples, always the same ones. Collective.

    The data-parallel ranks share the samples; `count` is cut to what there is. Fewer than all are drawn from the whole
    split, as neighbours come from one document.
    """
    count = min(count, len(samples))
    degree, place = ranks.layout.degree(Axis.DATA), ranks.layout.coordinate(ranks.rank, Axis.DATA)
    start, end = even_share(count, degree, place)
    # As many passes as the rank with the largest share makes: weights are gathered from everyone.
    firsts = range(start, start + -(-count // degree), microbatch)
    sizes = [max(min(microbatch, end - first), 0) for first in firsts]
    total, passed, was_training = 0.0, 0, model.training
    model.eval()
    ranks.activity.moving(0.0)
    for at in range(0, len(sizes), TOGETHER):
        some = sizes[at : at + TOGETHER]
        rows = [
            torch.from_numpy(samples.batch(ORDER, first if size else 0, max(size, 1))).to(ranks.device)
            for first, size in zip(firsts[at : at + TOGETHER], some, strict=True)
        ]
        losses: list[Tensor] = []
        for count_of, found in losses_of(rows):
            passed, losses = passed + count_of, losses + found
            ranks.activity.moving(passed / len(sizes))
        total += sum(float(loss) * size for loss, size in zip(losses, some, strict=False))
    model.train(was_training)
    return ranks.sum_all([total])[0] / count
