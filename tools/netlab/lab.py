"""An emulated cluster as a context manager, for any number of runs."""

import atexit
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from llmtrain.errors import BadInputError

from tools.netlab import network
from tools.netlab.counters import Traffic
from tools.netlab.processes import Ranks
from tools.netlab.spec import Spec


@dataclass(frozen=True)
class CardTraffic:
    """Traffic of one card in a run. Interface `lo`, network `loopback`: traffic between the ranks of the node.

    rate: bytes per second in each direction, None for unshaped. sent, received: bytes, including headers.
    """

    node: int
    interface: str
    network: str
    rate: float | None
    sent: int
    received: int


@dataclass(frozen=True)
class LabResult:
    """One run. returncode: 0, or that of the rank that failed first; negative for a signal, 124 for a timeout.

    output: the lines of each rank. seconds: from the first rank's start to the last one's end.
    """

    returncode: int
    output: tuple[tuple[str, ...], ...]
    traffic: tuple[CardTraffic, ...]
    seconds: float

    def sent(self, node: int) -> int:
        """Return the bytes that a node sent to other nodes."""
        return sum(card.sent for card in self.traffic if card.node == node and card.interface != "lo")


class Lab:
    """An emulated cluster, in a `with` block. Needs root.

        with Lab(plain(nodes=2, ranks_per_node=2, inter="100mbit")) as lab:
            result = lab.run(["python", "-m", "llmtrain", "run", "recipe.yaml"])

    Entering raises BadInputError if this machine cannot run a lab, RunFailedError if creating it fails.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        # The process id in the name identifies the leftovers of a killed lab.
        self.name = f"{network.PREFIX}{os.getpid()}-{secrets.token_hex(2)}"
        self._meeting = spec.meeting
        self._port = 29500
        self._ranks: Ranks | None = None

    def __enter__(self) -> Self:
        if (reason := network.why_not()) is not None:
            raise BadInputError(reason)
        network.remove(network.leftovers())
        atexit.register(self.close)
        try:
            network.build(self.spec, self.name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes of the lab and remove it."""
        network.remove(network.namespaces(f"{self.name}-"))
        atexit.unregister(self.close)

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        echo: bool = False,
    ) -> LabResult:
        """Run `command` on every rank and return when all have ended. If one fails, stop the others.

        env: variables in addition to those of this process and of the rank. timeout: seconds. echo: also write every
        line to stdout. The ranks die with this process.
        """
        before = self._traffic()
        # A port that was just in use may be unavailable for a while.
        self._port += 1
        local, world = self.spec.ranks_per_node, self.spec.world
        speeds = {rank: self.spec.speeds[rank // local] for rank in range(world) if rank // local in self.spec.speeds}
        self._ranks = Ranks([self._rank(rank, command, env or {}) for rank in range(world)], echo, speeds)
        try:
            returncode, seconds = self._ranks.wait(timeout)
        finally:
            ranks, self._ranks = self._ranks, None
        traffic = tuple(
            CardTraffic(node, name, *self._card(node, name), now.sent - then.sent, now.received - then.received)
            for node, (earlier, later) in enumerate(zip(before, self._traffic(), strict=True))
            for (name, now), then in zip(later.items(), earlier.values(), strict=True)
        )
        return LabResult(returncode, tuple(map(tuple, ranks.output)), traffic, seconds)

    def pass_on(self, number: int) -> bool:
        """Send a signal to every rank of the current run; return whether there is one. Signal handlers may call it."""
        if self._ranks is None:
            return False
        self._ranks.pass_on(number)
        return True

    def _rank(self, rank: int, command: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        spec, local = self.spec, self.spec.ranks_per_node
        node = rank // local
        interface = next(card.interface for card in spec.nodes[node] if card.network == self._meeting)
        place = {
            "RANK": rank,
            "WORLD_SIZE": spec.world,
            "LOCAL_RANK": rank % local,
            "LOCAL_WORLD_SIZE": local,
            "NODE_RANK": node,
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": len(spec.nodes),
            "MASTER_ADDR": network.address(spec, 0, self._meeting),
            "MASTER_PORT": self._port,
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "OMP_NUM_THREADS": max(1, len(os.sched_getaffinity(0)) // spec.world),
        }
        # Each of these commands execs the next one, so the last one, the rank's command, receives the signals.
        # Each node gets its own host name, so that ranks take nodes for different machines.
        named = ["unshare", "--uts", "sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"', f"node{node}"]
        space = ["ip", "netns", "exec", network.node_name(self.name, node)]
        inside = [*space, *named, "setpriv", "--pdeathsig", "KILL", "--"]
        # With this variable of an outer launcher, llmtrain would watch that launcher.
        outer = {key: value for key, value in os.environ.items() if key != "LLMTRAIN_LAUNCHER_PID"}
        # Without this, torch warns at each connection that the lab's addresses have no names.
        defaults = {"PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        if spec.intra is not None:
            # Shared memory would bypass the shaped loopback.
            defaults["NCCL_SHM_DISABLE"] = "1"
        return [*inside, *command], {**defaults, **outer, **{key: str(value) for key, value in place.items()}, **env}

    def _traffic(self) -> list[dict[str, Traffic]]:
        return [network.traffic(self.name, node) for node in range(len(self.spec.nodes))]

    def _card(self, node: int, interface: str) -> tuple[str, float | None]:
        if interface == "lo":
            return "loopback", self.spec.intra
        return next((card.network, card.rate) for card in self.spec.nodes[node] if card.interface == interface)
