"""Measured speeds of the pipeline's stages, for the split of layers."""

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.topology import stage_speeds
from llmtrain.comm.ranks import Ranks
from llmtrain.model.dtypes import DTYPES
from llmtrain.parallel.pipeline.speed import MatmulShape, measured_speeds
from llmtrain.plan.facts import Facts
from llmtrain.plan.plan import Plan


def splits_by_speed(plan: Plan, facts: Facts) -> bool:
    """Whether an automatic split of layers needs measured speeds: no description gives the speeds, and the ranks do not
    all share one processor."""
    one_processor = facts.device == "cpu" and facts.ranks_per_node == facts.world
    known = stage_speeds(plan.cluster, plan.grid) is not None
    return plan.grid.degree(Axis.PIPELINE) > 1 and not known and not one_processor


def measure(plan: Plan, ranks: Ranks) -> tuple[tuple[float, ...] | None, str]:
    """Return the measured speeds of the stages' ranks, None where they are equal, and a sentence about them.
    Collective."""
    rows = plan.batch.microbatch * plan.batch.sequence_length
    speeds = measured_speeds(MatmulShape(rows, plan.model.hidden, plan.model.ffn, DTYPES[plan.compute]), ranks)
    if speeds is None:
        return None, "stages are equally fast, as measured"
    return speeds, f"speeds of the stages, as measured: {', '.join(f'{speed:.2f}' for speed in speeds)}"
