"""The number of layers in each stage of a pipeline, without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llmtrain.errors import BadInputError
from llmtrain.model.config import GPTConfig
from llmtrain.model.tensors import model_units
from llmtrain.plan.pipeline.actions import Schedule

How = Literal["uniform", "balanced", "auto"] | Sequence[int]


@dataclass(frozen=True)
class StageCosts:
    """The costs of one layer, of the embedding, and of the head with the loss, in FLOPs or any other unit."""

    layer: float
    embedding: float = 0.0
    head: float = 0.0

    def of(self, split: Sequence[int]) -> list[float]:
        """Return the cost of each stage."""
        work = [layers * self.layer for layers in split]
        work[0] += self.embedding
        work[-1] += self.head
        return work


def stage_costs(config: GPTConfig, sequence_length: int) -> StageCosts:
    """Return the FLOPs per token that a model's parts compute, forward and backward.

    An embedding lookup has no multiplication, so it costs 0. Kernels of attention skip what the causal mask hides, so
    that they compute half of the products that `flops_per_token` counts.
    """
    block = model_units(config)[1]
    matrices = sum(tensor.numel for tensor in block.tensors if len(tensor.shape) == 2)
    return StageCosts(
        layer=6.0 * matrices + 6.0 * config.hidden * sequence_length, head=6.0 * config.hidden * config.vocab
    )


def recomputed_flops(config: GPTConfig, sequence_length: int, ends: bool) -> float:
    """Return the FLOPs per token that the recomputation of a block repeats, which has no random numbers. ends: whether
    the block is the last of its group, whose last product nothing needs again."""
    # A third of the FLOPs are in the forward pass.
    forward = stage_costs(config, sequence_length).layer / 3
    # The mask of dropout follows the last product.
    return forward - (2.0 * config.hidden * config.ffn if ends and not config.dropout else 0.0)


def split_layers(
    layers: int,
    ranks: int,
    how: How,
    costs: StageCosts,
    speeds: Sequence[float] | None = None,
    alpha: float = 1.0,
    chunks: int = 1,
    folded: bool = False,
) -> tuple[int, ...]:
    """Return the layers of each of `ranks * chunks` stages, in the order of the model; they sum to `layers`.

    how: the recipe's `pipeline.split`. uniform: the same number in each stage. balanced: the slowest rank takes the
    least possible time, embedding and head included. auto: the same, with each rank's speed. A list: these numbers. A
    rank with several stages counts with their sum, because it runs all of them for each microbatch; its layers are then
    split so that the slowest of its stages takes the least time. Among equally good splits, the one with more layers at
    the end of the model is chosen, because later stages hold fewer activations. speeds: the speed of each rank, in any
    unit. alpha: scales the share of faster ranks (see `shares`). folded: see `Schedule`. Raises BadInputError if there
    is no such split.
    """
    stages = ranks * chunks
    if layers < stages:
        needed = f"parallel.pipeline ({ranks})" + (f" times pipeline.chunks ({chunks})" if chunks > 1 else "")
        raise BadInputError(
            f"model.layers is {layers}; expected at least {stages}, one for each stage of {needed}; set fewer stages"
        )
    if how == "uniform":
        return _uniform(layers, stages)
    if not isinstance(how, str):
        return _given(layers, stages, how)
    weights = shares(speeds, alpha) if how == "auto" and speeds is not None else [1.0 / ranks] * ranks
    schedule = Schedule(ranks=ranks, chunks=chunks, microbatches=0, actions=(), folded=folded)
    owned = [[schedule.stage(rank, chunk) for chunk in range(chunks)] for rank in range(ranks)]
    extras = costs.of([0] * stages)
    totals = _even(
        layers,
        [chunks] * ranks,
        [sum(extras[stage] for stage in own) / weight for own, weight in zip(owned, weights, strict=True)],
        [costs.layer / weight for weight in weights],
    )
    split = [0] * stages
    for own, total in zip(owned, totals, strict=True):
        own = sorted(own)
        parts = _even(total, [1] * chunks, [extras[stage] for stage in own], [costs.layer] * chunks)
        for stage, part in zip(own, parts, strict=True):
            split[stage] = part
    return tuple(split)


def shares(speeds: Sequence[float], alpha: float) -> list[float]:
    """Return the share of the work that each rank should have. The shares sum to 1 (Holmes, equation 2).

    Ranks faster than the mean get alpha x speed / (sum of speeds). The other ranks divide the rest in proportion to
    their speeds. For two ranks this is the paper's equation without its rounding. Raises BadInputError if alpha leaves
    nothing for the slower ranks.
    """
    total = sum(speeds)
    # Rounding can make equal speeds differ from their mean.
    fast = [speed > total / len(speeds) * (1 + 1e-9) for speed in speeds]
    faster = sum(speed for speed, is_fast in zip(speeds, fast, strict=True) if is_fast)
    if alpha * faster >= total:
        raise BadInputError(
            f"pipeline.alpha is {alpha}; expected less than {total / faster:.3f}, at which the faster stages would "
            "take all layers"
        )
    remaining = (total - alpha * faster) / (total - faster) if faster else 1.0
    return [speed / total * (alpha if is_fast else remaining) for speed, is_fast in zip(speeds, fast, strict=True)]


def _uniform(layers: int, stages: int) -> tuple[int, ...]:
    if layers % stages:
        less = layers // stages * stages
        raise BadInputError(
            f"pipeline.split is uniform, but model.layers ({layers}) do not divide among {stages} stages; set "
            f"model.layers to {less} or {less + stages}, or pipeline.split=balanced"
        )
    return (layers // stages,) * stages


def _given(layers: int, stages: int, split: Sequence[int]) -> tuple[int, ...]:
    shown = f"pipeline.split is {list(split)}"
    if len(split) != stages:
        raise BadInputError(
            f"{shown}, which is {len(split)} stages; expected {stages}, one for each chunk of each rank of "
            "parallel.pipeline; or set pipeline.split=auto"
        )
    if min(split) < 1:
        raise BadInputError(f"{shown}; expected at least 1 layer in every stage")
    if sum(split) != layers:
        raise BadInputError(f"{shown}, which sums to {sum(split)}; expected the {layers} of model.layers")
    return tuple(split)


def _even(layers: int, least: Sequence[int], fixed: Sequence[float], each: Sequence[float]) -> list[int]:
    """Return the number of layers of each part, at least `least`, that minimizes the largest `fixed + count * each`.

    Each next layer goes to the part that would finish it first. This is optimal, because a layer never makes a part
    faster.
    """
    counts = list(least)
    for _ in range(layers - sum(least)):
        after = [start + (count + 1) * step for start, count, step in zip(fixed, counts, each, strict=True)]
        counts[min(range(len(counts)), key=lambda part: (after[part], -part))] += 1
    return counts
