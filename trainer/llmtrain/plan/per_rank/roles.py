"""The roles of a run's ranks: ranks with the same role hold tensors of the same sizes. No torch in here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from llmtrain.cluster.layout import Axis, Layout, even_share
from llmtrain.model.config import GPTConfig
from llmtrain.model.tensors import UnitSpec, model_units, sliced_units
from llmtrain.plan.pipeline.stage_layout import StageLayout
from llmtrain.plan.plan import Plan


@dataclass(frozen=True)
class Role:
    """Ranks with the same pipeline rank that hold equally large slices of the units of its stages.

    Data-parallel ranks are equal. Tensor-parallel ranks differ where their number does not divide the vocabulary. rank:
    the first of the ranks. ranks: number of them. pipeline: their pipeline rank. units: the units that `rank` holds, in
    the order of the model.
    """

    rank: int
    ranks: int
    pipeline: int
    units: tuple[UnitSpec, ...]

    @property
    def parameters(self) -> int:
        """Parameters of the units, before sharding over data-parallel ranks."""
        return sum(unit.numel for unit in self.units)


def roles(plan: Plan) -> list[Role]:
    """Return every role of a plan's ranks, in the order of the pipeline."""
    return roles_of(plan.model, plan.grid, plan.pipeline.stages)


def roles_of(model: GPTConfig, grid: Layout, stages: Sequence[Sequence[StageLayout]]) -> list[Role]:
    """Return every role. stages: stages of each rank of the pipeline, by chunk."""
    slices = _slices(model, grid.degree(Axis.TENSOR))
    first_of_pipeline, first_of_tensor = grid.group_of(0, Axis.PIPELINE), grid.group_of(0, Axis.TENSOR)
    found: list[Role] = []
    for pipeline_rank, stage_layouts in enumerate(stages):
        names = {name for stage in stage_layouts for name in stage.units}
        by_size: dict[tuple[int, ...], Role] = {}
        for tensor_rank, count, units in slices:
            own = tuple(unit for unit in units if unit.name in names)
            sizes, ranks = tuple(unit.numel for unit in own), count * grid.degree(Axis.DATA)
            if sizes in by_size:
                by_size[sizes] = replace(by_size[sizes], ranks=by_size[sizes].ranks + ranks)
            else:
                by_size[sizes] = Role(
                    first_of_pipeline[pipeline_rank] + first_of_tensor[tensor_rank], ranks, pipeline_rank, own
                )
        found += by_size.values()
    return found


@lru_cache(maxsize=8)
def _slices(model: GPTConfig, parts: int) -> list[tuple[int, int, tuple[UnitSpec, ...]]]:
    """Return the slices that tensor-parallel ranks hold: (the first of them, number of them, units) for each size.
    Cached, because all changes that may make a run fit ask for them."""
    units = model_units(model)
    rows = sorted({tensor.shape[0] for unit in units for tensor in unit.tensors if tensor.split})
    by_size: dict[tuple[int, ...], list[int]] = {}
    for tensor_rank in range(parts):
        shares = (even_share(count, parts, tensor_rank) for count in rows)
        by_size.setdefault(tuple(end - start for start, end in shares), []).append(tensor_rank)
    return [(same[0], len(same), sliced_units(model, same[0], parts)) for same in by_size.values()]
