"""`llmtrain bench comm` on one machine, and its errors when it cannot measure."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from llmtrain.cli.main import main
from llmtrain.cluster.load import load_cluster


def test_ranks_of_one_machine(tmp_path: Path) -> None:
    output = tmp_path / "here.yaml"
    command = [sys.executable, "-m", "llmtrain", "bench", "comm", "--nproc", "2", "--output", str(output), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    cluster = load_cluster(output)
    assert (cluster.name, cluster.node.ranks, cluster.clusters) == ("here", 2, ())
    (tier,) = cluster.node.tiers
    assert (tier.name, tier.ranks) == ("node", 2)
    found = json.loads(done.stdout)
    (link,) = found["links"]
    assert link["groups"] == [[0, 1]]
    assert link["bandwidth"] > 1e6
    assert 0 < link["latency"] < 1
    sizes = [timing["size"] for timing in link["timings"] if timing["operation"] == "all-reduce"]
    assert len(sizes) > 3
    assert sizes == [4**power for power in range(5, 5 + len(sizes))]
    assert found["cluster"]["node"]["ranks"] == 2


@pytest.mark.parametrize(
    ("words", "environment", "sentence"),
    [
        ([], {}, "bench comm measures the links between at least 2 ranks; here is no GPU for any; add --nproc N"),
        (["--cluster", "frontear"], {}, "there is no description of a cluster frontear; did you mean frontier?"),
        (
            ["--output", "absent/c.yaml"],
            {},
            "c.yaml cannot be written: there is no folder absent; make it first",
        ),
        ([], {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, "there are 3 ranks with 2 on the first node"),
        (
            ["--cluster", "lab-sites"],
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            "the cluster has 2 + 2 nodes of 2 ranks, but the run has 4 ranks; start it with 8",
        ),
    ],
)
def test_what_cannot_be_measured(
    words: list[str],
    environment: dict[str, str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(os, "environ", {**os.environ, **environment})
    assert main(["bench", "comm", *words]) == 2
    assert sentence in capsys.readouterr().err
