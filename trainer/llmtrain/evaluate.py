"""Mean loss over a fixed set of samples, the same on every layout."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from llmtrain_data.dataset import Samples

from llmtrain.cluster.layout import Axis, even_share
from llmtrain.cluster.ranks import Ranks
from llmtrain.model.gpt import GPT

# Seed of the order in which samples are evaluated: one for every run, so that their losses compare.
ORDER = 0


@torch.no_grad()
def mean_loss(
    model: GPT,
    samples: Samples,
    count: int,
    microbatch: int,
    ranks: Ranks,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> float:
    """Return the mean loss in nats per token over `count` samples, always the same ones. Collective.

    The data-parallel ranks share the samples; `count` is cut to what there is. Fewer than all are drawn from the whole
    split, as neighbours come from one document. around: surrounds each forward pass.
    """
    count = min(count, len(samples))
    degree, place = ranks.layout.degrees[Axis.DATA], ranks.layout.coordinate(ranks.rank, Axis.DATA)
    start, end = even_share(count, degree, place)
    was_training = model.training
    model.eval()
    total = 0.0
    # As many passes as the rank with the largest share makes: weights are gathered from everyone.
    for first in range(start, start + -(-count // degree), microbatch):
        size = min(microbatch, end - first)
        rows = torch.from_numpy(samples.batch(ORDER, first if size > 0 else 0, max(size, 1))).to(ranks.device)
        with around():
            total += float(model(rows[:, :-1], rows[:, 1:])) * max(size, 0)
    model.train(was_training)
    return ranks.sum_all([total])[0] / count
