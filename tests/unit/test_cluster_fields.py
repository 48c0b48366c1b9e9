"""Every field of a cluster file has an effect on what llmtrain shows of a run before it starts."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llmtrain.cli.main import main
from llmtrain.recipe.keys import recipe_keys

CLUSTER: dict[str, Any] = {
    "name": "sites",
    "accelerator": {
        "name": "A100-80GB",
        "memory": "80GB",
        "peak": {"bf16": "312TFLOP/s"},
        "bandwidth": "2TB/s",
        "host_link": "25GB/s",
    },
    "node": {
        "ranks": 8,
        "tiers": [{"name": "die", "ranks": 2, "bandwidth": "400GB/s", "latency": "1us"}],
        "host": {"memory": "1TB", "bandwidth": "200GB/s", "cores": 64, "sockets": 2},
        "nvme": [
            {"path": "/one", "bandwidth": "6GB/s", "socket": 0},
            {"path": "/two", "bandwidth": "3GB/s", "socket": 1},
        ],
    },
    "clusters": [
        {"name": "ib", "nodes": 1, "nic": {"kind": "infiniband", "interface": "ib0"}, "speed": 1.0},
        {"name": "roce", "nodes": 1, "nics": [{"kind": "roce", "interface": "eth1", "bandwidth": "200Gbit/s"}]},
    ],
    "between": {"kind": "ethernet", "interface": "eth0", "bandwidth": "25Gbit/s", "latency": "50us"},
}
# Another value of each field. The cards of one cluster give the times of the tier of both.
OTHER: dict[str, Any] = {
    "name": "another",
    "accelerator.name": "H100",
    "accelerator.memory": "40GB",
    "accelerator.peak": {"bf16": "100TFLOP/s"},
    "accelerator.bandwidth": "1TB/s",
    "accelerator.host_link": "12GB/s",
    "node.ranks": 16,
    "node.tiers[].name": "pair",
    "node.tiers[].ranks": 4,
    "node.tiers[].bandwidth": "100GB/s",
    "node.tiers[].latency": "5us",
    "node.host.memory": "2TB",
    "node.host.bandwidth": "100GB/s",
    "node.host.cores": 32,
    "node.host.sockets": 4,
    "node.nvme[].path": "/three",
    "node.nvme[].bandwidth": "5GB/s",
    "node.nvme[].socket": 1,
    "clusters[].name": "another",
    "clusters[].nodes": 3,
    "clusters[].nic.kind": "slingshot",
    "clusters[].nic.interface": "ib1",
    "clusters[].nic.bandwidth": "100Gbit/s",
    "clusters[].nic.latency": "9us",
    "clusters[].nics[].kind": "slingshot",
    "clusters[].nics[].interface": "eth2",
    "clusters[].nics[].bandwidth": "100Gbit/s",
    "clusters[].nics[].latency": "9us",
    "clusters[].speed": 0.5,
    "between.kind": "tcp",
    "between.interface": "eth3",
    "between.bandwidth": "1Gbit/s",
    "between.latency": "1ms",
}


def leaves() -> Iterator[str]:
    keys = [key.removeprefix("cluster.") for key in recipe_keys() if key.startswith("cluster.")]
    for key in keys:
        if not any(other.startswith((f"{key}.", f"{key}[")) for other in keys) and not key.endswith("[]"):
            yield key


def test_all_fields_are_tried() -> None:
    assert list(leaves()) == list(OTHER)


def changed(cluster: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a cluster with another value of `key`, in the first item of a list that has the section."""
    found = copy.deepcopy(cluster)
    section: Any = found
    *path, name = re.findall(r"\w+|\[\]", key)
    for place, word in enumerate(path):
        if word == "[]":
            inner = next((one for one in path[place + 1 :] if one != "[]"), None)
            section = next(item for item in section if inner is None or inner in item)
        else:
            section = section[word]
    section[name] = OTHER[key]
    return found


def shown(cluster: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the commands print of a run with a pipeline stage in each cluster."""
    Path("cluster.yaml").write_text(json.dumps(cluster))
    said = []
    for command in (["cluster", "show", "cluster.yaml"], ["plan", "tiny.yaml"], ["pipeline", "show", "tiny.yaml"]):
        flops = ["--flops", "100TFLOP/s"] if command[0] == "pipeline" else []
        assert main([*command, "--json", *flops]) == 0
        said.append(capsys.readouterr().out)
    return "".join(said)


@pytest.mark.parametrize("key", OTHER)
def test_a_field_has_an_effect(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(
        "model: {preset: gpt2-1m}\n"
        "data: {path: set, sequence_length: 64}\n"
        "train: {global_batch: 64}\n"
        "parallel: {pipeline: 2}\n"
        "zero: {preset: topo}\n"
        "offload: {optimizer: nvme, share: 0.5}\n"
        "cluster: cluster.yaml\n"
    )
    assert shown(changed(CLUSTER, key), capsys) != shown(CLUSTER, capsys)
