"""`llmtrain eval`, and the evaluations of a run: which samples they read, and how these count."""

import json
from collections import Counter
from dataclasses import asdict
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmtrain.checkpoint.save import Checkpointer
from llmtrain.checkpoint.state_shard import StateShard
from llmtrain.cli.main import main
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import Ranks
from llmtrain.model.config import GPTConfig
from llmtrain.model.tensors import model_units
from llmtrain_data.config import DataConfig
from llmtrain_data.dataset import Source, open_split
from llmtrain_data.indexed import IndexedWriter

from tests.in_process import train_here
from tests.tiny import rows

LENGTH, TOKENS = 16, 33
CONFIG = GPTConfig(
    family="llama", layers=1, hidden=32, heads=4, kv_heads=2, ffn=64, positions=32, vocab=65, tie_embeddings=False,
    norm_eps=1e-5, rope_theta=1e4, rotary_fraction=1.0, activation="swiglu", dropout=0.0,
)  # fmt: skip
RECIPE = """
model: {{family: gpt2, layers: 1, hidden: 16, heads: 2, vocab: 64}}
data: {{path: [3, {folder}/a, 1, {folder}/b], sequence_length: 16, split: [50, 50, 0]}}
train: {{steps: 6, global_batch: 8, microbatch: 8, eval_every: 3, eval_batches: 104}}
optimizer: {{lr: 1.0e-2, warmup: 1}}
logging: {{dir: {folder}/runs}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The set `a` of 20 documents, `b` of 200 and `held-out` of 200, of 33 random tokens each."""
    random = np.random.default_rng(0)
    for name, documents, below in (("a", 20, 20), ("b", 200, 64), ("held-out", 200, 64)):
        writer = IndexedWriter(tmp_path / name, np.dtype(np.uint16))
        writer.add(random.integers(0, below, documents * TOKENS), np.full(documents, TOKENS))
        writer.commit()
    return tmp_path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The ranges that were read: the name of the set, the first token and the one after the last."""
    found: list[tuple[str, int, int]] = []
    original = Source.read

    def noted(source: Source, start: int, end: int) -> np.ndarray:
        found.append((Path(source.data.prefix).name, source.first + start, source.first + end))
        return original(source, start, end)

    monkeypatch.setattr(Source, "read", noted)
    return found


def checkpoint(folder: Path, **data: Any) -> str:
    """Write a checkpoint of random weights. data: its recipe's section; none for an imported checkpoint."""
    ranks = Ranks(0, 0, Layout({Axis.DATA: 1}), torch.device("cpu"))
    torch.manual_seed(0)
    shards = [StateShard(u, 0, u.numel, {"master": 0.3 * torch.randn(u.numel)}) for u in model_units(CONFIG)]
    about = {"recipe": {"data": data} if data else {}, "model": asdict(CONFIG)}
    assert Checkpointer(folder / "run/checkpoints", ranks, 1, asynchronous=False).save(0, shards, {}, about) is None
    return str(folder / "run")


def blend(folder: Path, *weights: float) -> str:
    path = [value for pair in zip(weights, (str(folder / "a"), str(folder / "b")), strict=True) for value in pair]
    return checkpoint(folder, path=path, sequence_length=LENGTH, split=[50.0, 50.0, 0.0])


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("split", "documents"),
    [((), 200), (("--split", "train"), 196), (("--split", "valid"), 2), (("--split", "test"), 2)],
)
@pytest.mark.parametrize("imported", [True, False])
def test_another_set_is_evaluated_as_a_whole(
    imported: bool, split: tuple[str, ...], documents: int, folder: Path,
    read: list[tuple[str, int, int]], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = checkpoint(folder) if imported else checkpoint(folder, path=str(folder / "a"), sequence_length=32)
    found = evaluated(capsys, run, "--data", str(folder / "held-out"), *split)
    # The checks of ids read other ranges.
    windows = [(name, first) for name, first, end in read if end - first == 33]
    assert len(windows) == len(set(windows)) == found["samples"] == (documents * TOKENS - 1) // 32
    assert {name for name, _ in windows} == {"held-out"}
    assert len({token // TOKENS for _, first in windows for token in range(first, first + 33)}) == documents
    assert found["split"] == (split[1] if split else "all")
    assert found["shares"] == ([98, 1, 1] if split else None)
    assert "sources" not in found
    capsys.readouterr()
    assert main(["eval", run, "--data", str(folder / "held-out"), *split]) == 0
    part = "of data.split 98/1/1; " if split else f"all of {folder / 'held-out'}; "
    assert part in capsys.readouterr().out


@pytest.mark.parametrize("split", [(), ("--split", "valid"), ("--split", "train")])
def test_a_validation_set_of_its_own_is_evaluated_whole(
    split: tuple[str, ...], folder: Path, read: list[tuple[str, int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = checkpoint(folder, path=str(folder / "a"), validation=str(folder / "held-out"), sequence_length=32)
    found = evaluated(capsys, run, *split)
    training = "train" in split
    name, documents = ("a", 19) if training else ("held-out", 200)
    assert {one for one, first, end in read if end - first == 33} == {name}
    assert found["samples"] == (documents * TOKENS - 1) // 32
    assert (found["split"], found["shares"]) == (("train", [99, 0, 1]) if training else ("valid", None))
    assert main(["eval", run, *split]) == 0
    assert ("of data.split 99/0/1" if training else f"all of {folder / 'held-out'}") in capsys.readouterr().out
    assert evaluated(capsys, run, "--data", str(folder / "b"))["sets"] == [str(folder / "b")]


def test_a_set_without_a_whole_sample_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = IndexedWriter(folder / "short", np.dtype(np.uint16))
    writer.add(np.arange(10), np.array([5, 5]))
    writer.commit()
    assert main(["eval", checkpoint(folder), "--data", str(folder / "short")]) == 2
    said = capsys.readouterr().err
    assert f"{folder / 'short'} has 10 tokens in 2 of 2 documents, too few for one sample" in said
    assert "split" not in said


def test_a_blend_is_evaluated_once(
    folder: Path, read: list[tuple[str, int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = blend(folder, 7, 3)
    found = evaluated(capsys, run)
    windows = [(name, first) for name, first, end in read if end - first == LENGTH + 1]
    counts = Counter(name for name, _ in windows)
    assert counts == {"a": (10 * TOKENS - 1) // LENGTH, "b": (100 * TOKENS - 1) // LENGTH}
    assert len(set(windows)) == len(windows) == found["samples"]
    assert [(Path(each["source"]).name, each["weight"], each["samples"]) for each in found["sources"]] == [
        ("a", 0.7, counts["a"]), ("b", 0.3, counts["b"]),
    ]  # fmt: skip
    assert main(["eval", run]) == 0
    first, head, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"valid: loss {found['loss']:.4f}, ")
    assert first.endswith("; mean of the sources by weight)")
    assert head.split() == ["source", "weight", "samples", "loss", "perplexity"]
    for line, each, weight in zip(lines, found["sources"], ("70.00%", "30.00%"), strict=True):
        perplexity = f"{exp(each['loss']):.2f}"
        assert line.split() == [each["source"], weight, f"{each['samples']}", f"{each['loss']:.4f}", perplexity]
    # Each source has the loss that it has alone.
    alone = []
    for name in counts:
        again = evaluated(capsys, run, "--data", str(folder / name), "--split", "valid")
        alone.append(again["loss"])
        assert "sources" not in again
    assert [each["loss"] for each in found["sources"]] == pytest.approx(alone, rel=1e-6)
    assert abs(alone[0] - alone[1]) > 0.01
    assert found["loss"] == pytest.approx(0.7 * alone[0] + 0.3 * alone[1], rel=1e-6)
    assert found["perplexity"] == exp(found["loss"])


def test_some_samples_of_a_blend_follow_its_weights(
    folder: Path, read: list[tuple[str, int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluated(capsys, blend(folder, 7, 3), "--samples", "30")
    drawn = [window for window in read if window[2] - window[1] == LENGTH + 1]
    assert Counter(name for name, _, _ in drawn) == {"a": 21, "b": 9}
    assert (found["samples"], "sources" in found) == (30, False)
    read.clear()
    path: list[str | float] = [0.7, str(folder / "a"), 0.3, str(folder / "b")]
    samples = open_split(DataConfig(path=path, sequence_length=LENGTH, split=(50.0, 50.0, 0.0)), "valid")
    samples.batch(0, 0, 30)
    assert sorted(drawn) == sorted(read)


def test_a_run_evaluates_no_sample_twice(
    folder: Path, read: list[tuple[str, int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 832 samples the blend draws 624 of `a`, whose split has 20, and 208 of `b`, whose split has 206."""
    (folder / "tiny.yaml").write_text(RECIPE.format(folder=folder))
    name = train_here(folder / "tiny.yaml").name
    half = {"a": 10 * TOKENS, "b": 100 * TOKENS}
    drawn = [(name, first) for name, first, end in read if end - first == LENGTH + 1 and first >= half[name]]
    assert Counter(name for name, _ in set(drawn)) == {"a": 20, "b": 206}
    # In each of three evaluations.
    assert set(Counter(drawn).values()) == {3}
    logged = [row["loss"] for row in rows(folder / "runs" / name) if row.get("event") == "eval"]
    whole = evaluated(capsys, str(folder / "runs" / name))
    a, b = (each["loss"] for each in whole["sources"])
    assert abs(a - b) > 0.1
    assert logged[-1] == pytest.approx(whole["loss"], rel=1e-5)
