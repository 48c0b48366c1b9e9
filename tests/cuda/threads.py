"""Threads, conditions, queues and futures of a machine: they hand on what the thread knows that releases another."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

from tests.cuda.clocks import Knowledge
from tests.cuda.machine import Machine


def standing_for(machine: Machine) -> SimpleNamespace:
    """Return the classes, bound to a machine, under the names that they have in Python's library."""
    return SimpleNamespace(
        get_ident=threading.get_ident,
        **{each.__name__: partial(each, machine) for each in (Thread, Condition, Event, Future, SimpleQueue)},
    )


class Thread:
    """Stands for `threading.Thread`."""

    def __init__(
        self, machine: Machine, target: Callable[..., object], args: Sequence[Any] = (), name: str = "",
        daemon: bool = True,
    ) -> None:  # fmt: skip
        self._machine, self._run, self._name = machine, partial(target, *args), name

    def start(self) -> None:
        """See Python's library."""
        self.join = self._machine.start(self._run, self._name)


class Condition:
    """Stands for `threading.Condition`."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._known, self._told = machine, Knowledge(), False

    def __enter__(self) -> Self:
        self._machine.clocks.learn(self._machine.thread, self._known)
        return self

    def __exit__(self, *error: object) -> None:
        self._known = self._machine.clocks.known(self._machine.thread)
        if self._told:
            self._told = False
            self._machine.let_others()

    def wait_for(self, reached: Callable[[], object]) -> None:
        """See Python's library."""
        self.__exit__()
        with self._machine.waiting():
            self._machine.until(lambda: bool(reached()))
            self.__enter__()

    def notify_all(self) -> None:
        """See Python's library."""
        self._told = True


class Event:
    """Stands for `threading.Event`."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._set, self._known = machine, False, Knowledge()

    def is_set(self) -> bool:
        """See Python's library."""
        if self._set:
            self._machine.clocks.learn(self._machine.thread, self._known)
        return self._set

    def set(self) -> None:
        """See Python's library. Who finds it set may have found it so before a second call."""
        if not self._set:
            self._set, self._known = True, self._machine.clocks.known(self._machine.thread)
            self._machine.turn.notify_all()

    def clear(self) -> None:
        """See Python's library."""
        self._set = False

    def wait(self) -> None:
        """See Python's library."""
        with self._machine.waiting():
            self._machine.until(lambda: self._set)
            self.is_set()


class Future:
    """Stands for `concurrent.futures.Future`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._result: list[tuple[BaseException | None, Knowledge]] = []

    def set_result(self, result: object) -> None:
        """See Python's library."""
        self._end(None)

    def set_exception(self, error: BaseException) -> None:
        """See Python's library."""
        self._end(error)

    def done(self) -> bool:
        """See Python's library."""
        if self._result:
            self._machine.clocks.learn(self._machine.thread, self._result[0][1])
        return bool(self._result)

    def exception(self) -> BaseException | None:
        """See Python's library. It is done."""
        return self._result[0][0]

    def result(self) -> None:
        """See Python's library."""
        with self._machine.waiting():
            self._machine.until(lambda: bool(self._result))
            self.done()
        if (error := self._result[0][0]) is not None:
            raise error

    def _end(self, error: BaseException | None) -> None:
        self._result.append((error, self._machine.clocks.known(self._machine.thread)))
        self._machine.turn.notify_all()


class SimpleQueue:
    """Stands for `queue.SimpleQueue`."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._items = machine, deque[tuple[Any, Knowledge]]()

    def put(self, item: Any) -> None:
        """See Python's library."""
        self._items.append((item, self._machine.clocks.known(self._machine.thread)))
        self._machine.turn.notify_all()

    def get(self) -> Any:
        """See Python's library."""
        self._machine.until(lambda: bool(self._items))
        item, known = self._items.popleft()
        self._machine.clocks.learn(self._machine.thread, known)
        return item
