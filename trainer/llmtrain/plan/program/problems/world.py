"""What ranks share while their programs are followed together. No torch in here."""

from collections.abc import Callable
from dataclasses import dataclass, field

from llmtrain.cluster.layout import Axis
from llmtrain.plan.pipeline.actions import Kind
from llmtrain.plan.program.problems.grid import RankPrograms
from llmtrain.plan.program.problems.lanes import Lanes
from llmtrain.plan.program.problems.places import Place


@dataclass(frozen=True)
class Wait:
    """What a rank waits for at a place, until it is ready."""

    place: Place | str
    ready: Callable[[], bool]
    what: Callable[[], str]


@dataclass
class World:
    """What the ranks share.

    symmetric_axes: axes along which one rank is followed for all. backward_first: whether message-driven prefers
    backward passes. sent: microbatches whose message was sent, by pipeline line, kind and stage of the sender. met: the
    places at which a rank has waited for its tensor-parallel ranks. choices: kinds of passes that message-driven chose,
    by the first tensor-parallel rank.
    """

    ranks: RankPrograms
    symmetric_axes: frozenset[Axis]
    backward_first: bool
    lanes: Lanes = field(default_factory=Lanes)
    sent: dict[tuple[int, Kind, int], list[int]] = field(default_factory=dict)
    met: dict[int, list[str]] = field(default_factory=dict)
    choices: dict[int, list[Kind]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
