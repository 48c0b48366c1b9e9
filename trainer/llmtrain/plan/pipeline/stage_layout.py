"""The part of the model that each rank of a pipeline holds, as pure data without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from llmtrain.model.config import GPTConfig
from llmtrain.model.tensors import UnitSpec, sliced_units
from llmtrain.plan.pipeline.actions import Schedule


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """The part of the model in one `stage`: blocks `[first, end)`. opens: it also has the embedding, before them.
    closes: it also has the head, after them. tied: the head uses the embedding's matrix. recompute: blocks of one group
    of activation checkpointing, 0 for none."""

    stage: int
    first: int
    end: int
    opens: bool
    closes: bool
    tied: bool
    recompute: int = 0

    @cached_property
    def units(self) -> tuple[str, ...]:
        """Names of the units that the stage computes with, in the order of the model."""
        names = [f"blocks.{index}" for index in range(self.first, self.end)]
        if self.opens or (self.closes and self.tied):
            names.insert(0, "embedding")
        return (*names, "head") if self.closes else tuple(names)

    @cached_property
    def groups(self) -> tuple[range, ...]:
        """Blocks that activation checkpointing recomputes together, in the order of the model; none without it."""
        starts = range(self.first, self.end, self.recompute) if self.recompute else ()
        return tuple(range(start, min(start + self.recompute, self.end)) for start in starts)


def stage_layouts_of(
    config: GPTConfig, schedule: Schedule, split: Sequence[int], recompute: Sequence[int], rank: int
) -> tuple[StageLayout, ...]:
    """Return the stages of a rank of the pipeline, in the order of its chunks. split: layers of each stage. recompute:
    blocks of one group of activation checkpointing of each stage, 0 for none."""
    borders = list(accumulate(split, initial=0))
    stages = [schedule.stage(rank, chunk) for chunk in range(schedule.chunks)]
    return tuple(
        StageLayout(
            stage=stage,
            first=borders[stage],
            end=borders[stage + 1],
            opens=stage == 0,
            closes=stage == schedule.stages - 1,
            tied=config.tie_embeddings,
            recompute=recompute[stage],
        )
        for stage in stages
    )


def units_of(config: GPTConfig, stage_layouts: Sequence[StageLayout], tensor_rank: int, parts: int) -> list[UnitSpec]:
    """Return the units of a rank's stages, in the order of the model, with the shapes that the tensor-parallel rank
    `tensor_rank` of `parts` holds."""
    names = {name for stage_layout in stage_layouts for name in stage_layout.units}
    return [unit for unit in sliced_units(config, tensor_rank, parts) if unit.name in names]
