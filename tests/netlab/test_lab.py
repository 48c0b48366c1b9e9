"""An emulated cluster has the stated rates, byte counts and reachability, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from llmtrain.cluster.load import load_cluster
from llmtrain.errors import BadInputError

from tools.netlab.lab import Lab, LabResult
from tools.netlab.network import leftovers, namespaces
from tools.netlab.spec import of_cluster, plain

pytestmark = pytest.mark.netlab

ROOT = Path(__file__).resolve().parents[2]

# Ranks 0 and 1 send each other SIZE bytes at the same time over plain TCP; each prints the bytes per second that it
# received, without the first megabyte, which a full token bucket lets through at once.
EXCHANGE = """
import os, socket, threading, time
rank, size, first = int(os.environ["RANK"]), int(os.environ["SIZE"]), 1_000_000
there = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    link = socket.create_server(there).accept()[0]
else:
    while True:
        try:
            link = socket.create_connection(there)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
threading.Thread(target=link.sendall, args=(bytes(size),)).start()
got = 0
while got < size:
    got += len(link.recv(1 << 20))
    if got <= first:
        begin, skipped = time.perf_counter(), got
print((got - skipped) / (time.perf_counter() - begin))
"""

GATHER = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
shard = torch.full((int(os.environ["SIZE"]) // 4,), float(dist.get_rank()))
whole = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
for _ in range(2):
    dist.all_gather(whole, shard)
assert [int(part[-1]) for part in whole] == [0, 1, 2, 3]
dist.destroy_process_group()
"""

# Rank 0 listens on every card until rank 1 is done. Rank 1 prints the cards whose networks reach rank 0.
REACH = """
import os, socket, time
def reach(address):
    while True:
        try:
            return socket.create_connection((address, 9000), timeout=3)
        except ConnectionRefusedError:
            # The card is there, and rank 0 does not listen yet.
            time.sleep(0.05)
        except OSError:
            return None
if os.environ["RANK"] == "0":
    with socket.create_server(("0.0.0.0", 9000)) as server:
        while server.accept()[0].recv(4) != b"done":
            pass
else:
    reached = [address for address in os.environ["ADDRESSES"].split(",") if reach(address)]
    print(*reached, sep="\\n")
    reach(reached[0]).sendall(b"done")
"""


def python(lab: Lab, program: str, **env: object) -> LabResult:
    result = lab.run([sys.executable, "-c", program], {key: str(value) for key, value in env.items()}, timeout=60)
    assert result.returncode == 0, result.output
    return result


@pytest.mark.parametrize("rate", ["100mbit", "400mbit"])
def test_links_are_as_fast_as_asked_both_ways(rate: str) -> None:
    asked = float(rate.removesuffix("mbit")) * 1e6 / 8
    with Lab(plain(nodes=2, ranks_per_node=1, inter=rate)) as lab:
        result = python(lab, EXCHANGE, SIZE=int(2 * asked))
    for lines in result.output:
        assert float(lines[0]) == pytest.approx(asked, rel=0.1)
    for card in result.traffic:
        if card.interface != "lo":
            assert card.sent == pytest.approx(2 * asked, rel=0.02)
            assert card.received == pytest.approx(2 * asked, rel=0.02)


def test_ranks_of_a_node_speak_as_fast_as_asked() -> None:
    with Lab(plain(nodes=1, ranks_per_node=2, inter="1mbit", intra="400mbit")) as lab:
        result = python(lab, EXCHANGE, SIZE=25_000_000)
        told = lab.run(["sh", "-c", "echo $NCCL_SHM_DISABLE"])
    # Both directions share the loopback.
    assert sum(float(lines[0]) for lines in result.output) == pytest.approx(50e6, rel=0.1)
    # Traffic that avoids the loopback would have no limit.
    assert told.output == (("1",), ("1",))


def test_bytes_of_an_all_gather(lab: Lab) -> None:
    """gloo gathers in a ring: each rank passes on all shards but one, and every second hop crosses between the
    nodes."""
    shard = 1_000_000
    result = python(lab, GATHER, SIZE=shard)
    for card in result.traffic:
        for moved in (card.sent, card.received):
            # Beside two gathers of 3 shards, the ranks need some bytes to connect.
            assert 6 * shard < moved < 6.3 * shard, card
    assert result.sent(0) == sum(card.sent for card in result.traffic if (card.node, card.interface) == (0, "eth0"))


def test_the_environment_of_ranks(lab: Lab) -> None:
    names = "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $NODE_RANK $MASTER_ADDR $GLOO_SOCKET_IFNAME $MINE"
    result = lab.run(["sh", "-c", f"echo {names}"], {"MINE": "x"})
    assert result.output == (
        ("0 4 0 2 0 10.0.0.1 eth0 x",),
        ("1 4 1 2 0 10.0.0.1 eth0 x",),
        ("2 4 0 2 1 10.0.0.1 eth0 x",),
        ("3 4 1 2 1 10.0.0.1 eth0 x",),
    )


def test_cards_of_unlike_clusters_meet_only_between() -> None:
    spec = of_cluster(load_cluster("two-sites"), nodes=1, ranks_per_node=1, slower=1000)
    assert [[(card.interface, card.rate) for card in node] for node in spec.nodes] == [
        [("ib0", 25e6), ("eth0", 25e9 / 8 / 1000)],
        [("eth1", 25e6), ("eth0", 25e9 / 8 / 1000)],
    ]
    with Lab(spec) as lab:
        addresses = [f"10.{network}.0.1" for network in range(3)]
        result = python(lab, REACH, ADDRESSES=",".join(addresses))
    assert result.output[1] == (addresses[spec.networks.index("between")],)


def test_several_cards_are_networks_of_their_own() -> None:
    spec = of_cluster(load_cluster("frontier"), nodes=2, ranks_per_node=1, slower=1000)
    with Lab(spec) as lab:
        addresses = [f"10.{network}.0.1" for network in range(4)]
        result = python(lab, REACH, ADDRESSES=",".join(addresses))
    assert result.output[1] == tuple(addresses)
    spoken = {card.interface: card.sent > 0 for card in result.traffic if card.node == 1}
    assert spoken == {"lo": False, "hsn0": True, "hsn1": True, "hsn2": True, "hsn3": True}


def test_one_failure_ends_all(lab: Lab) -> None:
    result = lab.run(["sh", "-c", "[ $RANK = 2 ] && exit 7; sleep 100"], timeout=60)
    assert result.returncode == 7
    assert result.seconds < 30
    assert lab.run(["sh", "-c", "kill -9 $$"]).returncode == -signal.SIGKILL


def test_a_timeout_ends_all(lab: Lab) -> None:
    result = lab.run(["sh", "-c", "echo here; sleep 100 & sleep 100"], timeout=0.5)
    assert result.returncode == 124
    assert result.output == (("here",),) * 4


def test_descriptions_that_cannot_be_emulated() -> None:
    with pytest.raises(BadInputError, match="does not say how many nodes"):
        of_cluster(load_cluster("frontier"))
    same_name = {"interface": "eth0", "bandwidth": "1Gbit/s"}
    clusters = [{"name": name, "nodes": 1, "nic": same_name} for name in "ab"]
    twice = load_cluster({"node": {"ranks": 1}, "clusters": clusters, "between": same_name})
    with pytest.raises(BadInputError, match="eth0 is the name of two cards"):
        of_cluster(twice)


def start(ready: int, *arguments: str) -> subprocess.Popen[str]:
    """Start the command and return when this many ranks have printed that they are ready."""
    command = [sys.executable, "-m", "tools.netlab", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for _ in range(ready):
        assert "ready" in process.stdout.readline()
    return process


def test_the_command_line(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = ["--nodes", "2", "--inter", "1Gbit/s", "--json", str(report), "--", "sh", "-c", "echo ready; exit $RANK"]
    # The failing rank may cause the other one to be ended before it prints.
    process = start(1, *command)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "exit code 1" in output
    data = json.loads(report.read_text())
    assert (data["nodes"], data["ranks_per_node"], data["returncode"]) == (2, 1, 1)
    assert [(card["node"], card["interface"], card["rate"]) for card in data["cards"] if card["interface"] != "lo"] == [
        (0, "eth0", 125e6),
        (1, "eth0", 125e6),
    ]


def test_signals_reach_the_ranks() -> None:
    program = "trap 'echo got it; exit 75' TERM; echo ready; sleep 60 & wait"
    process = start(2, "--nodes", "2", "--", "sh", "-c", program)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert output.count("got it") == 2


def test_what_a_killed_lab_leaves_is_cleaned() -> None:
    process = start(2, "--nodes", "2", "--", "sh", "-c", "sleep 1000 & echo ready; wait")
    process.kill()
    process.wait()
    left = [name for name in leftovers() if name.startswith(f"netlab-{process.pid}-")]
    assert len(left) == 3
    clean = [sys.executable, "-m", "tools.netlab", "--clean"]
    done = subprocess.run(clean, cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in left)
    assert namespaces(f"netlab-{process.pid}-") == []


def test_without_root_or_tools_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = plain(nodes=1, ranks_per_node=1)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BadInputError, match="needs the command ip; install iproute2"), Lab(spec):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(BadInputError, match="which needs root; run it as root"), Lab(spec):
        pass
