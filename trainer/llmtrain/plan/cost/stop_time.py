"""How long a run takes at least from a signal to stop until it has saved. No torch in here."""

from dataclasses import dataclass

from llmtrain.model.tensors import parameter_count
from llmtrain.plan.cost.lane_times import lane_times
from llmtrain.plan.cost.simulated_step import rank_computation
from llmtrain.plan.cost.volume_traffic import moved_of
from llmtrain.plan.memory.checkpoint_copies import STATE_BYTES
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.by_rank import programs_of

# Bytes per second that a node is taken to write of a checkpoint: no cluster file states them.
WRITE_RATE = 1e9


@dataclass(frozen=True)
class StopTime:
    """steps: seconds of the step that runs and of the next one, in which ranks may first agree to stop. nbytes: bytes
    of a checkpoint. save: seconds in which it is written at WRITE_RATE."""

    steps: float
    nbytes: int
    save: float

    @property
    def seconds(self) -> float:
        """Seconds in all."""
        return self.steps + self.save


def stop_time(plan: Plan) -> StopTime | None:
    """Return how long a run takes at least to stop; None if the description does not state the accelerator's peak."""
    computation = rank_computation(plan, 0)
    if plan.cluster is None or computation is None:
        return None
    programs = programs_of(plan)
    lanes = [lane.seconds or 0.0 for lane in lane_times(plan, programs, moved_of(plan, programs))]
    nbytes, nodes = STATE_BYTES * parameter_count(plan.model), max(1, plan.grid.world // plan.cluster.node.ranks)
    return StopTime(2 * max([computation.seconds, *lanes]), nbytes, nbytes / nodes / WRITE_RATE)
