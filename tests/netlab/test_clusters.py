"""Clusters whose fast cards do not reach each other: every process group uses the card that connects its ranks."""

import json
import sys
from pathlib import Path

import pytest
from llmtrain.cluster.load import load_cluster

from tools.netlab.lab import Lab
from tools.netlab.spec import of_cluster

pytestmark = pytest.mark.netlab

BYTES = 4_000_000

# Every rank sums BYTES in its group along each axis in turn, and prints the bytes that its node's cards sent for it.
SUMS = """
import json, os, torch, torch.distributed as dist
from llmtrain.cluster.parallel import ParallelConfig
from llmtrain.cluster.load import load_cluster
from llmtrain.comm.subgroups import make_groups
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.topology import layout_degrees
from llmtrain.comm.ranks import connect, disconnect

def sent():
    dist.barrier()
    lines = open("/proc/self/net/dev").read().splitlines()[2:]
    dist.barrier()
    return {line.split(":")[0].strip(): int(line.split(":")[1].split()[8]) for line in lines}

torch.set_num_threads(1)
world, tensor, pipeline = (int(os.environ[key]) for key in ("WORLD_SIZE", "TENSOR", "PIPELINE"))
layout = Layout(layout_degrees(ParallelConfig(tensor=tensor, pipeline=pipeline), world))
ranks = connect(layout, cluster=load_cluster(os.environ["CLUSTER"]))
found = {}
for name, groups in {**{axis.value: layout.groups(axis) for axis in Axis}, "world": [list(range(world))]}.items():
    environment = dict(os.environ)
    group = make_groups(ranks, groups)
    assert dict(os.environ) == environment
    values = torch.full((int(os.environ["BYTES"]) // 4,), float(2**ranks.rank))
    before = sent()
    dist.all_reduce(values, group=group)
    found[name] = {interface: count - before[interface] for interface, count in sent().items()}
    own = next(members for members in groups if ranks.rank in members)
    assert int(values[-1]) == sum(2**rank for rank in own), values[-1]
print(json.dumps(found))
disconnect(ranks)
"""

THREE = """
node: {ranks: 1}
clusters:
  - {name: a, nodes: 2, nic: {kind: infiniband, interface: ib0, bandwidth: 800mbit}}
  - {name: b, nodes: 2, nic: {kind: roce, interface: roce0, bandwidth: 400mbit}}
  - {name: c, nodes: 2, nic: {kind: infiniband, interface: ib0, bandwidth: 800mbit}}
between: {interface: eth0, bandwidth: 200mbit}
"""


@pytest.mark.parametrize("clusters", [2, 3])
def test_each_axis_speaks_through_its_card(clusters: int, tmp_path: Path) -> None:
    description = "lab-sites"
    if clusters == 3:
        description = str(tmp_path / "three.yaml")
        Path(description).write_text(THREE)
    spec = of_cluster(load_cluster(description))
    local = spec.ranks_per_node
    degrees = {"TENSOR": str(local), "PIPELINE": str(clusters)}
    with Lab(spec) as lab:
        env = {**degrees, "CLUSTER": description, "BYTES": str(BYTES)}
        result = lab.run([sys.executable, "-c", SUMS], env, timeout=120)
    assert result.returncode == 0, result.output
    for node, cards in enumerate(spec.nodes):
        sent = json.loads(result.output[node * local][-1])
        busy = {axis: {name for name, count in moved.items() if count > BYTES / 8} for axis, moved in sent.items()}
        fast = cards[0].interface
        assert fast in ("ib0", "roce0")
        assert busy["tensor"] == ({"lo"} if local > 1 else set())
        assert busy["data"] == {fast}
        assert busy["pipeline"] == {"eth0"}
        assert busy["world"] - {"lo"} == {"eth0"}
        # Each rank of a node sums with its neighbour on the other node: half of the bytes go there, and half come back.
        assert sent["data"][fast] == pytest.approx(local * BYTES, rel=0.05)
        assert sent["data"]["eth0"] < 0.02 * BYTES
