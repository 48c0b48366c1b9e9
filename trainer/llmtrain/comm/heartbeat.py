"""What ranks write into the store in every round, for the ranks that watch them."""

import json
from dataclasses import dataclass, field

from llmtrain.comm.crash_notes import Last
from llmtrain.comm.flight_recorder import GroupProgress


@dataclass(frozen=True)
class ProcessId:
    """A process of a machine. born: when it started, which tells it from a later process with the same pid."""

    host: str
    pid: int
    born: float


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What a rank does. moved: when it last began something, by its own clock, in seconds. lost: whether it has lost
    contact to others. writing: whether it writes its part of a checkpoint. waiting: whether its host waits for others.
    groups: progress of its collectives by group, where its host runs ahead of its GPU and nothing has moved for a
    round."""

    step: int = 0
    doing: str = ""
    moved: float = 0.0
    lost: bool = False
    writing: bool = False
    waiting: bool = False
    groups: dict[str, GroupProgress] = field(default_factory=dict)


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life. number: counts them. sent: when it was written, by the rank's own clock, in seconds."""

    process: ProcessId
    number: int = 0
    state: RankState = RankState()
    sent: float = 0.0

    @property
    def host(self) -> str:
        """The machine that the rank is on."""
        return self.process.host

    @property
    def last(self) -> Last:
        """What the rank did last."""
        return Last(self.state.step, "writing its part of a checkpoint" if self.state.writing else self.state.doing)


def key_of(rank: int) -> str:
    """Return the store's key of a rank's heartbeat."""
    return f"heartbeat/{rank}"


def parse(text: bytes) -> Heartbeat:
    """Return the heartbeat that was written as JSON."""
    read = json.loads(text)
    groups = {name: GroupProgress(*values) for name, values in read["state"].pop("groups").items()}
    state = RankState(**read["state"], groups=groups)
    return Heartbeat(ProcessId(**read["process"]), read["number"], state, read["sent"])
