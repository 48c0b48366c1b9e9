"""Whether the steps of a message-driven pipeline on GPUs end, where a host waits for its GPU to load a kernel, and a
large send ends only with its receive: a model of hosts and GPUs, in random orders of events, with the engine's rule."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple, cast

import pytest
from llmtrain.comm.messages import Channel
from llmtrain.parallel.pipeline.action_order import MessageDrivenOrder
from llmtrain.plan.pipeline.stage_layout import StageLayout

SIZES = [(ranks, microbatches, limit) for ranks, microbatches, limit in product((2, 3, 4), (1, 3, 6), (1, 2, 3, 5))]
SEEDS = 20


class Message(NamedTuple):
    """The `number`-th one of a channel."""

    channel: Channel
    number: int


def _order(message: Message) -> tuple[int, int, int]:
    """A seed's order of events must not depend on that of a set."""
    return message.channel.source, message.channel.target, message.number


class NothingArrivedError(Exception):
    """What the model's links raise in place of waiting."""


class Gpus:
    """The messages of all ranks. held: whether a send is posted only once its receive is. microbatches: messages of
    each channel."""

    def __init__(self, microbatches: int, held: bool) -> None:
        self._microbatches, self._held = microbatches, held
        self._sent, self._received, self.over = set[Message](), set[Message](), set[Message]()

    def send(self, message: Message) -> None:
        self._sent.add(message)

    def receive(self, message: Message) -> None:
        if message.number < self._microbatches:
            self._received.add(message)

    def ready(self) -> list[Message]:
        """Return the messages whose ends are both posted, and that are the next ones of their channels."""
        both = self._sent & self._received - self.over
        return [
            one
            for one in sorted(both, key=_order)
            if not one.number or Message(one.channel, one.number - 1) in self.over
        ]

    def idle(self, rank: int) -> bool:
        """Return whether nothing that a rank has posted is still to end."""
        posted = {one for one in self._sent if not self._held or one in self._received}
        own = {one for one in posted if one.channel.source == rank}
        own |= {one for one in self._received if one.channel.target == rank}
        return own <= self.over


class Host:
    """What one rank's host does in a step. It is the links of the engine's order too. always: whether it loads a kernel
    in each pass, and not only in the first one of each kind."""

    def __init__(self, gpus: Gpus, rank: int, ranks: int, microbatches: int, limit: int, always: bool) -> None:
        self._gpus, self._rank, self._last = gpus, rank, ranks - 1
        self._microbatches, self._always = microbatches, always
        opens, closes = rank == 0, rank == self._last
        layout = StageLayout(stage=rank, first=rank, end=rank + 1, opens=opens, closes=closes, tied=False)
        links = cast(Any, self)
        self._decide = MessageDrivenOrder(layout, microbatches, limit, links, links)._is_backward_next
        self._taken = Counter[Channel]()
        self._acts = self._step()
        self._may_go_on: Callable[[], bool] = lambda: True

    def arrived(self, channel: Channel) -> bool:
        """See StageLinks."""
        message = Message(channel, self._taken[channel])
        self._gpus.receive(message)
        return message in self._gpus.over

    def wait_any(self, channels: Sequence[Channel]) -> None:
        """See StageLinks."""
        raise NothingArrivedError

    def goes_on(self) -> bool:
        """Do the next thing, if it can be done now, and return whether it was."""
        if not self._may_go_on():
            return False
        self._may_go_on = next(self._acts, lambda: False)
        return True

    def _step(self) -> Iterator[Callable[[], bool]]:
        """Yield, before each thing that waits, what tells whether it still has to."""
        passed, kinds = {False: 0, True: 0}, set[bool]()
        while passed[True] < self._microbatches:
            found: list[bool] = []
            yield lambda found=found: self._decided(passed[False], passed[True], found)  # type: ignore[misc]
            backward = found[0]
            self._taken[Channel(self._rank + (1 if backward else -1), self._rank)] += 1
            if self._always or backward not in kinds:
                yield lambda: self._gpus.idle(self._rank)
            kinds.add(backward)
            target = self._rank + (-1 if backward else 1)
            if 0 <= target <= self._last:
                self._gpus.send(Message(Channel(self._rank, target), passed[backward]))
            passed[backward] += 1

    def _decided(self, forward: int, backward: int, found: list[bool]) -> bool:
        try:
            found[:] = [self._decide(forward, backward)]
        except NothingArrivedError:
            return False
        return True


def ends(ranks: int, microbatches: int, limit: int, *, always: bool, held: bool, seed: int) -> bool:
    """Run a step in a random order of events; return whether all messages have been exchanged at its end."""
    gpus, order = Gpus(microbatches, held), random.Random(seed)
    hosts = [Host(gpus, rank, ranks, microbatches, limit, always) for rank in range(ranks)]
    while True:
        events: list[Callable[[], bool]] = [host.goes_on for host in hosts]
        events += [lambda one=one: gpus.over.add(one) is None for one in gpus.ready()]  # type: ignore[misc]
        order.shuffle(events)
        # Hosts that ask for messages post receives, for which others may be ready.
        if not any(event() for event in events) and not gpus.ready():
            return len(gpus.over) == 2 * (ranks - 1) * microbatches


@pytest.mark.parametrize(("ranks", "microbatches", "limit"), SIZES)
def test_a_step_ends_if_sends_are_held(ranks: int, microbatches: int, limit: int) -> None:
    for seed in range(SEEDS):
        assert ends(ranks, microbatches, limit, always=False, held=True, seed=seed)


@pytest.mark.parametrize(("ranks", "microbatches", "limit"), SIZES)
def test_a_first_step_ends_without_that(ranks: int, microbatches: int, limit: int) -> None:
    for seed in range(SEEDS):
        assert ends(ranks, microbatches, limit, always=False, held=False, seed=seed)


def test_later_passes_must_not_wait_for_their_gpu() -> None:
    """As they do where the allocator frees memory: two neighbours may then wait for each other's messages."""
    assert not any(ends(3, 6, 3, always=True, held=True, seed=seed) for seed in range(SEEDS))
    assert all(ends(3, 6, 1, always=True, held=True, seed=seed) for seed in range(SEEDS))


def test_a_receive_beyond_the_limit_would_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the order does not ask for: the first stage sends no more before it gets a gradient."""
    found = MessageDrivenOrder.__init__

    def init(self: MessageDrivenOrder, layout: StageLayout, microbatches: int, limit: int, *rest: Any) -> None:
        found(self, layout, microbatches, limit if layout.opens else microbatches, *rest)

    monkeypatch.setattr(MessageDrivenOrder, "__init__", init)
    assert not all(ends(3, 6, 2, always=False, held=True, seed=seed) for seed in range(SEEDS))
