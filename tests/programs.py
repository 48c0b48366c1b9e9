"""Programs for tests that make units without a plan."""

from collections.abc import Sequence

from llmtrain.model.config import GPTConfig
from llmtrain.plan.pipeline.actions import Action, Kind
from llmtrain.plan.pipeline.schedules import one_forward_one_backward
from llmtrain.plan.pipeline.stage_layout import StageLayout
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.spec import ProgramSpec
from llmtrain.sharding.unit import ShardedUnit

FORWARD, BACKWARD = Action(0, 0, Kind.F), Action(0, 0, Kind.B)


def whole_model(config: GPTConfig, recompute: int = 0) -> StageLayout:
    """Return the only stage of a model. recompute: blocks that are recomputed together, 0 for none."""
    tied = config.tie_embeddings
    return StageLayout(stage=0, first=0, end=config.layers, opens=True, closes=True, tied=tied, recompute=recompute)


def programs_of(
    units: Sequence[ShardedUnit], stages: Sequence[StageLayout], actions: Sequence[Action] = ()
) -> Programs:
    """Return the programs of a rank with `units`. actions: by default a forward and a backward pass."""
    return Programs(
        ProgramSpec(
            stages=tuple(stages),
            actions=tuple(actions) or one_forward_one_backward(1, 1).actions[0],
            splits_backward=any(action.kind is Kind.W for action in actions),
            padded={unit.spec.name: unit.ranges.padded for unit in units},
            degrees={unit.spec.name: unit.degrees for unit in units},
        )
    )
