"""Network namespaces, veth pairs and shaped links. `remove` undoes everything here.

There is one namespace for each node, and one with a bridge for each network. A card is a veth pair between the two. tbf
shapes both ends, because a queue limits only outgoing packets: the node's end limits the node's sends, the bridge's end
its receives.

The MTU is Linux's maximum (65,535 instead of 1,500 bytes). So headers take 66 bytes of 64 KiB, 0.1% instead of 4%, and
the byte counters nearly equal the payload. Queues are long enough to lose no packet, as on InfiniBand. Congestion
control is Reno, which then always sends at full rate; the machine's default, such as BBR, may slow down to probe.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from llmtrain.errors import RunFailedError

from tools.netlab.counters import Traffic
from tools.netlab.spec import Card, Spec

PREFIX = "netlab-"
MTU = 65535
# Burst after a pause: two packets, or 2 ms of the link's rate if that is more, so that late timers cost no bandwidth.
BURST_BYTES, BURST_SECONDS = 2 * 65536, 0.002
QUEUE_BYTES = 64 * 2**20

# IPv6 is off so that its neighbour discovery does not add to the byte counters.
_SETTINGS = {
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_slow_start_after_idle": "0",
    # Receive buffers for a fast link with long latency, as on a tuned machine: the default 64 KiB would limit it to one
    # message of a pipeline per round trip.
    "ipv4/tcp_rmem": "4096 4194304 33554432",
    "ipv4/ip_forward": "0",
    "ipv6/conf/default/disable_ipv6": "1",
}


def why_not() -> str | None:
    """Return why this machine cannot run a lab, as a sentence, or None if it can."""
    if os.geteuid() != 0:
        return "netlab makes network namespaces, which needs root; run it as root"
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("setpriv", "util-linux"), ("unshare", "util-linux")):
        if shutil.which(tool) is None:
            return f"netlab needs the command {tool}; install {package}"
    name = f"{PREFIX}{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", name)
        _shape(name, "lo", 1e6)
    except RunFailedError as error:
        return f"netlab cannot make network namespaces with shaped links here: {error}"
    finally:
        remove([name])
    return None


def node_name(lab: str, node: int) -> str:
    """Return the name of a node's namespace."""
    return f"{lab}-n{node}"


def address(spec: Spec, node: int, network: str) -> str:
    """Return the address that a node has on a network."""
    return f"10.{spec.networks.index(network)}.{node // 250}.{node % 250 + 1}"


def build(spec: Spec, lab: str) -> None:
    """Create the namespaces of `spec`, with the prefix `lab`. Raises RunFailedError; call `remove` after it, too."""
    hub = f"{lab}-hub"
    _add_namespace(hub)
    for index, _ in enumerate(spec.networks):
        _run("ip", "-n", hub, "link", "add", f"br{index}", "mtu", str(MTU), "type", "bridge", "mcast_snooping", "0")
        _up(hub, f"br{index}")
    held = []
    for node, cards in enumerate(spec.nodes):
        _add_namespace(node_name(lab, node))
        _up(node_name(lab, node), "lo")
        if spec.intra is not None:
            _shape(node_name(lab, node), "lo", spec.intra)
        for card in cards:
            port = _plug(spec, lab, node, card)
            if card.latency or card.jitter:
                held.append(f"{port},{port}d,{card.latency},{card.jitter}")
    if held:
        _delay(hub, held)


def namespaces(prefix: str) -> list[str]:
    """Return the names of the namespaces that begin with `prefix`."""
    lines = _run("ip", "netns", "list").splitlines()
    return [name for name in (line.split()[0] for line in lines if line) if name.startswith(prefix)]


def remove(names: list[str]) -> None:
    """Kill the processes in these namespaces and delete them. Skip namespaces that do not exist."""
    for name in names:
        with contextlib.suppress(RunFailedError):
            for pid in _run("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _run("ip", "netns", "delete", name)


def leftovers() -> list[str]:
    """Return the namespaces of labs whose process has ended."""
    return [name for name in namespaces(PREFIX) if not os.path.exists(f"/proc/{_owner(name)}")]


def traffic(lab: str, node: int) -> dict[str, Traffic]:
    """Return the counters of a node's interfaces, by name."""
    links = json.loads(_run("ip", "-n", node_name(lab, node), "-j", "-s", "link", "show"))
    both = {link["ifname"]: link["stats64"] for link in links}
    return {name: Traffic(stats["tx"]["bytes"], stats["rx"]["bytes"]) for name, stats in both.items()}


def _owner(name: str) -> str:
    return name.removeprefix(PREFIX).partition("-")[0]


def _add_namespace(name: str) -> None:
    _run("ip", "netns", "add", name)
    writes = (f"echo {value} > /proc/sys/net/{key}" for key, value in _SETTINGS.items())
    _run("ip", "netns", "exec", name, "sh", "-ec", "; ".join(writes))


def _plug(spec: Spec, lab: str, node: int, card: Card) -> str:
    """Connect a card to the bridge of its network; return the port's name. `_delay` connects a delayed card."""
    hub, name, network = f"{lab}-hub", node_name(lab, node), spec.networks.index(card.network)
    port = f"n{node}-{network}"
    ends = (port, "mtu", str(MTU), "type", "veth", "peer", "name", card.interface, "mtu", str(MTU), "netns", name)
    _run("ip", "-n", hub, "link", "add", *ends)
    plug = port
    if card.latency or card.jitter:
        plug = f"{port}b"
        _run("ip", "-n", hub, "link", "add", f"{port}d", "mtu", str(MTU), "type", "veth", "peer", plug, "mtu", str(MTU))
        _up(hub, f"{port}d")
        _up(hub, plug)
    _run("ip", "-n", hub, "link", "set", plug, "master", f"br{network}")
    _run("ip", "-n", name, "address", "add", f"{address(spec, node, card.network)}/16", "dev", card.interface)
    for namespace, interface in ((hub, port), (name, card.interface)):
        if card.rate is not None:
            _shape(namespace, interface, card.rate)
        _up(namespace, interface)
    return port


def _delay(hub: str, links: list[str]) -> None:
    """Start the process that joins delayed cards to their bridges. It ends with the namespace."""
    inside = ["ip", "netns", "exec", hub, "setpriv", "--pdeathsig", "KILL", "--"]
    program = [sys.executable, str(Path(__file__).with_name("delay.py")), *links]
    # Nobody waits for this process: `remove` kills it, and it dies with this process.
    started = subprocess.Popen([*inside, *program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert started.stdout is not None
    if (said := started.stdout.readline().strip()) != "ready":
        raise RunFailedError(f"links cannot be delayed here: {said}")


def _up(namespace: str, interface: str) -> None:
    _run("ip", "-n", namespace, "link", "set", interface, "up")


def _shape(namespace: str, interface: str, rate: float) -> None:
    burst = max(BURST_BYTES, round(rate * BURST_SECONDS))
    limits = ("rate", f"{round(rate * 8)}bit", "burst", f"{burst}b", "limit", f"{QUEUE_BYTES}b")
    _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *limits)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailedError(f"`{' '.join(command)}` failed: {' '.join(done.stderr.split()) or done.returncode}")
    return done.stdout
