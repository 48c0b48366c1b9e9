"""The order of a rank's actions: fixed by the schedule, or decided by the messages that have arrived."""

from collections.abc import Iterator
from functools import partial
from typing import Protocol

from llmtrain.comm.decisions import Decision
from llmtrain.comm.messages import Channel
from llmtrain.offload.activations import OffloadedActivations
from llmtrain.parallel.pipeline.stage_links import StageLinks
from llmtrain.plan.pipeline.actions import Action, Kind, Schedule
from llmtrain.plan.pipeline.stage_layout import StageLayout


class ActionOrder(Protocol):
    """The actions of one rank in each optimizer step."""

    @property
    def most_live(self) -> int:
        """The most microbatches of a stage that any rank of the pipeline holds at the same time."""

    def actions(self) -> Iterator[Action]:
        """Yield the actions of one step. Each is run before the next one is asked for."""

    def close(self) -> None:
        """Release process groups."""


class FixedOrder:
    """The list of actions that the schedule has for a rank."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._actions, self.most_live = schedule.actions[rank], schedule.most_live

    def actions(self) -> Iterator[Action]:
        """Yield the schedule's actions."""
        return iter(self._actions)

    def close(self) -> None:
        """Do nothing: the order has no process group."""


class OrderWithOffload:
    """An order whose passes save and use the inputs of recomputed groups."""

    def __init__(self, order: ActionOrder, activations: OffloadedActivations) -> None:
        self._order, self._activations, self.most_live = order, activations, order.most_live

    def actions(self) -> Iterator[Action]:
        """Yield the actions of `order`."""
        with self._activations.step():
            for action in self._order.actions():
                with self._activations.action(action):
                    yield action

    def close(self) -> None:
        """Close `order`."""
        self._order.close()


class MessageDrivenOrder:
    """Runs what has arrived, backward passes first (Singh and Bhatele 2022, Algorithm 2).

    limit: the most microbatches that a stage has in flight: the first one takes no more, so no other gets more.
    microbatches: their number in each step. decide: shared by the tensor-parallel ranks of a stage. Messages arrive in
    a different order on each of them, but they must all run the same action, because its layers contain collectives.
    """

    def __init__(self, layout: StageLayout, microbatches: int, limit: int, links: StageLinks, decide: Decision) -> None:
        self._layout, self._microbatches, self._limit = layout, microbatches, limit
        self._links, self._decide = links, decide
        self.most_live = min(limit, microbatches)

    def actions(self) -> Iterator[Action]:
        """Yield each next action once the messages that it needs have arrived."""
        forward = backward = 0
        while backward < self._microbatches:
            if self._decide(partial(self._is_backward_next, forward, backward)):
                yield Action(backward, 0, Kind.B)
                backward += 1
            else:
                yield Action(forward, 0, Kind.F)
                forward += 1

    def close(self) -> None:
        """Release the process group of the decision."""
        self._decide.close()

    def _is_backward_next(self, forward: int, backward: int) -> bool:
        """Wait until an action can run after so many passes, and return whether it is a backward pass."""
        layout, links = self._layout, self._links
        activations, gradients = Channel(layout.stage - 1, layout.stage), Channel(layout.stage + 1, layout.stage)
        while True:
            # The last stage computes gradients from its own loss, and the first one reads its inputs from the data.
            if forward > backward and (layout.closes or links.arrived(gradients)):
                return True
            # Not asked for beyond the limit: over NCCL, the receive would occupy the GPU until this stage's own
            # backward pass lets the first stage send more.
            more = forward < min(self._microbatches, backward + self._limit)
            if more and (layout.opens or links.arrived(activations)):
                return False
            awaited = [gradients] if forward > backward else []
            if more:
                awaited.append(activations)
            links.wait_any(awaited)
