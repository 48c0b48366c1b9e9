"""For every strategy: a recipe that exceeds its memory by one byte is refused, and the sentence's advice, followed
literally, fits."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from llmtrain.cli.main import main

RECIPE = """
model: {family: llama, layers: 8, hidden: 512, heads: 8, vocab: 1001}
data: {path: set, sequence_length: 256}
train: {global_batch: 128, microbatch: 4}
"""
RANKS = 16
STRATEGIES = [
    ("zero.stage=0",),
    ("zero.stage=1",),
    ("zero.stage=2",),
    ("zero.stage=3",),
    ("zero.stage=3", "zero.secondary=node"),
    ("zero.stage=3", "zero.resident=20MB"),
    ("zero.preset=zero++",),
    ("zero.preset=topo",),
    ("zero.partition={weights: 4, gradients: 8, optimizer: 16}", "zero.hierarchical=false"),
    ("parallel.tensor=2",),
    ("parallel.tensor=4", "parallel.sequence=true", "zero.stage=2"),
    ("parallel.pipeline=4",),
    ("parallel.pipeline=4", "pipeline.schedule=zero-bubble", "zero.stage=1"),
    ("parallel.pipeline=2", "pipeline.schedule=message-driven"),
    ("parallel.tensor=2", "parallel.pipeline=2", "parallel.data=4", "pipeline.schedule=interleaved", "zero.stage=3"),
    ("activation_checkpointing=full", "zero.stage=1"),
    ("model.tie_embeddings=true", "parallel.pipeline=2", "model.dropout=0.1"),
    ("offload.optimizer=host",),
    ("offload.optimizer=host", "offload.spare=1", "offload.spare_weights=device"),
    ("offload.parameters=host", "parallel.tensor=2"),
    ("offload.parameters=nvme", "offload.gradients=host", "zero.stage=2"),
]


@pytest.fixture(autouse=True)
def _in_folder_with_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(RECIPE)


def planned(
    capsys: pytest.CaptureFixture[str], keys: dict[str, str], memory: str, host: str = "1TB"
) -> tuple[int, dict[str, Any], str]:
    """Return the exit code of `plan` on a cluster file, what it shows of memory, and its error."""
    node = {"ranks": 8, "host": {"memory": host}, "nvme": [{"path": "/scratch"}]}
    Path("cluster.json").write_text(json.dumps({"accelerator": {"memory": memory}, "node": node}))
    # auto would fill the memory, or offload no more than it must.
    rest = keys.get("offload.parameters", "auto")
    fixed = {"zero.resident": "0", "offload.share": "1", "offload.gradients": rest, "offload.spare_weights": "host"}
    words = [f"{key}={value}" for key, value in (fixed | keys).items()]
    code = main(["plan", "small.yaml", *words, "cluster=cluster.json", "--ranks", str(RANKS), "--json"])
    said = capsys.readouterr()
    return code, json.loads(said.out)["memory"], said.err


def as_keys(words: tuple[str, ...] | list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def followed(keys: dict[str, str], error: str) -> dict[str, str]:
    """Return keys with those of the sentence's advice."""
    (advised,) = re.findall(r"; set (.*), which needs .* \(--force takes it as it is\)", error)
    return keys | as_keys(advised.split())


@pytest.mark.parametrize("strategy", STRATEGIES, ids=" ".join)
def test_one_byte_of_the_device(strategy: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    keys = as_keys(strategy)
    # By default, gathered weights take what memory there is.
    _, found, _ = planned(capsys, {"zero.resident": "0"} | keys, "1TB")
    needed = max(row["total"] for row in found["roles"])
    code, found, error = planned(capsys, keys, f"{needed}B")
    assert (code, found["excess"], error) == (0, 0, "")
    code, found, error = planned(capsys, keys, f"{needed - 1}B")
    assert (code, found["excess"]) == (2, 1)
    assert f"1 B more than cluster.accelerator.memory ({needed - 1}B)" in error
    code, found, error = planned(capsys, followed(keys, error), f"{needed - 1}B")
    assert (code, found["excess"], error) == (0, 0, "")
    assert max(row["total"] for row in found["roles"]) < needed


@pytest.mark.parametrize(
    "strategy",
    [
        ("offload.optimizer=host", "offload.spare=0"),
        ("offload.optimizer=host", "offload.spare=1", "zero.stage=3"),
        ("offload.optimizer=nvme", "offload.paths=[/scratch]"),
        ("offload.parameters=host", "zero.stage=1"),
        ("zero.stage=1", "model.layers=12"),
    ],
    ids=" ".join,
)
def test_one_byte_of_the_host(strategy: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    keys = as_keys(strategy)
    _, found, _ = planned(capsys, keys, "1TB")
    needed = 8 * max(sum(row["host"].values()) for row in found["roles"])
    code, found, error = planned(capsys, keys, "1TB", f"{needed}B")
    assert (code, found["host_excess"], error) == (0, 0, "")
    # A rank has an even share of it.
    code, found, error = planned(capsys, keys, "1TB", f"{needed - 1}B")
    assert (code, found["host_excess"]) == (2, 1)
    assert f"1 B more than its share of cluster.node.host.memory ({needed - 1}B for 8 ranks)" in error
    code, found, error = planned(capsys, followed(keys, error), "1TB", f"{needed - 1}B")
    assert (code, found["host_excess"], error) == (0, 0, "")


def test_the_ranks_of_a_node_need_not_take_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """A node has 4 ranks of each of two stages, of which one has the embedding or the head besides."""
    keys = as_keys(("offload.optimizer=host", "offload.spare=0", "parallel.pipeline=4"))
    _, found, _ = planned(capsys, keys, "1TB")
    held = [sum(row["host"].values()) for row in found["roles"]]
    assert [row["ranks"] for row in found["roles"]] == [4, 4, 4, 4]
    needed = max(4 * (held[0] + held[1]), 4 * (held[2] + held[3]))
    assert needed < 8 * max(held)
    code, found, error = planned(capsys, keys, "1TB", f"{needed}B")
    assert (code, found["host_excess"], error) == (0, 0, "")
    code, found, error = planned(capsys, keys, "1TB", f"{needed - 1}B")
    assert (code, found["host_excess"]) == (2, 1)


def test_copies_for_checkpoints_are_the_first_to_go(capsys: pytest.CaptureFixture[str]) -> None:
    _, found, _ = planned(capsys, {}, "1TB")
    needed = 8 * max(sum(row["host"].values()) for row in found["roles"])
    _, _, error = planned(capsys, {}, "1TB", f"{needed - 1}B")
    assert followed({}, error) == {"checkpoint.async": "false"}
