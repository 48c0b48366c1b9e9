"""Uneven emulated clusters: links with latency, and nodes that are slower than others."""

import sys
from dataclasses import replace

import pytest
from llmtrain.cluster.load import load_cluster
from llmtrain.errors import BadInputError

from tools.netlab.lab import Lab
from tools.netlab.spec import Card, Spec, of_cluster, plain

pytestmark = pytest.mark.netlab

# Rank 1 sends rank 0 a byte and gets one back, 20 times, and prints the shortest time; then it sends SIZE bytes, which
# rank 0 checks.
PING = """
import os, socket, time
there, size = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), int(os.environ["SIZE"])
pattern = bytes(range(250)) * (size // 250)
if os.environ["RANK"] == "0":
    link = socket.create_server(there).accept()[0]
    for _ in range(20):
        link.send(link.recv(1))
    came = bytearray()
    while len(came) < size:
        came += link.recv(1 << 20)
    assert came == pattern
else:
    while True:
        try:
            link = socket.create_connection(there)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    took = []
    for _ in range(20):
        begin = time.perf_counter()
        link.send(b"x")
        link.recv(1)
        took.append(time.perf_counter() - begin)
    link.sendall(pattern)
    print(min(took))
"""

# Prints the share of the time in which this process ran.
SPIN = """
import time
begin, ran = time.monotonic(), time.process_time()
while time.monotonic() < begin + 1.0:
    pass
print((time.process_time() - ran) / (time.monotonic() - begin))
"""


@pytest.mark.parametrize("seconds", [(0.02, 0.02), (0.03, 0.0)])
def test_messages_are_on_their_way_for_as_long_as_asked(seconds: tuple[float, float]) -> None:
    nodes = tuple((Card("eth0", "net", 50e6, latency),) for latency in seconds)
    size = 5_000_000
    with Lab(Spec(1, nodes)) as lab:
        result = lab.run([sys.executable, "-c", PING], {"SIZE": str(size)}, timeout=60)
    assert result.returncode == 0, result.output
    there_and_back = float(result.output[1][0])
    assert sum(seconds) <= there_and_back < sum(seconds) + 0.02
    # Each frame arrives exactly once, and complete.
    assert size < result.sent(1) < 1.02 * size


def test_a_slowed_node_runs_for_its_share_of_the_time() -> None:
    spec = replace(plain(nodes=2, ranks_per_node=1), speeds={1: 0.25})
    with Lab(spec) as lab:
        result = lab.run([sys.executable, "-c", SPIN], timeout=60)
        assert result.returncode == 0, result.output
        whole, slowed = (float(lines[0]) for lines in result.output)
        assert 0.1 < slowed < 0.35
        assert whole > 2 * slowed
        # Signals and failures reach a rank that is stopped at that moment.
        assert lab.run(["sh", "-c", "[ $RANK = 1 ] && exit 3; sleep 100"], timeout=60).returncode == 3
        assert lab.run(["sh", "-c", "[ $RANK = 0 ] && exit 4; sleep 100"], timeout=60).returncode == 4


def test_what_a_description_says_of_it() -> None:
    clusters = [
        {"name": "a", "nodes": 1, "speed": 2.0, "nic": {"interface": "ib0", "latency": "2us"}},
        {"name": "b", "nodes": 2, "nic": {"interface": "ib0", "latency": "1ms"}},
    ]
    between = {"interface": "eth0", "latency": "5ms"}
    cluster = load_cluster({"node": {"ranks": 1}, "clusters": clusters, "between": between})
    spec = of_cluster(cluster)
    assert spec.speeds == {1: 0.5, 2: 0.5}
    assert [[card.latency for card in cards] for cards in spec.nodes] == [[0.0, 0.005]] + [[0.001, 0.005]] * 2
    slower = of_cluster(cluster, slower=1000)
    assert slower.nodes[0][0].latency == pytest.approx(0.002)
    assert of_cluster(load_cluster("two-sites")).speeds == {}


@pytest.mark.parametrize("speeds", [{2: 0.5}, {0: 0.0}, {0: 1.5}])
def test_speeds_that_cannot_be(speeds: dict[int, float]) -> None:
    with pytest.raises(BadInputError, match=r"expected one of the nodes 0 to 1, and a share of the time"):
        replace(plain(nodes=2, ranks_per_node=1), speeds=speeds)
