"""What ranks share while their programs are followed together. No torch in here."""

from collections.abc import Callable
from dataclasses import dataclass, field

from llmtrain.cluster.layout import Axis
from llmtrain.plan.pipeline.actions import Kind
from llmtrain.plan.validation.grid import RankPrograms
from llmtrain.plan.validation.lanes import Lanes
from llmtrain.plan.validation.places import ProgramPlace


@dataclass(frozen=True)
class ProgramWait:
    """What a rank waits for at a place, until it is ready."""

    place: ProgramPlace | str
    ready: Callable[[], bool]
    what: Callable[[], str]


@dataclass(kw_only=True)
class World:
    """What the ranks share.

    symmetric_axes: axes along which all ranks have the same program, so that only the first one is followed.
    backward_first: whether ranks in message-driven order prefer backward passes. sent: microbatches whose message was
    sent, by pipeline line, kind and stage of the sender. met: by rank, the places at which it waited for its
    tensor-parallel ranks. choices: by first tensor-parallel rank, the kinds of passes that it chose in message-driven
    order.
    """

    ranks: RankPrograms
    symmetric_axes: frozenset[Axis]
    backward_first: bool
    lanes: Lanes = field(default_factory=Lanes)
    sent: dict[tuple[int, Kind, int], list[int]] = field(default_factory=dict)
    met: dict[int, list[str]] = field(default_factory=dict)
    choices: dict[int, list[Kind]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
