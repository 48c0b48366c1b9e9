"""`llmtrain ckpt` on a run's folder."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from llmtrain.checkpoint.save import Checkpointer
from llmtrain.checkpoint.state_shard import StateShard
from llmtrain.cli.ckpt import app
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import Ranks
from llmtrain.errors import BadInputError, RunFailedError
from llmtrain.model.config import GPTConfig
from llmtrain.model.tensors import model_units, parameter_count
from typer.testing import CliRunner, Result

CONFIG = GPTConfig(
    family="llama", layers=1, hidden=32, heads=4, kv_heads=2, ffn=64, positions=32, vocab=65, tie_embeddings=False,
    norm_eps=1e-5, rope_theta=1e4, rotary_fraction=1.0, activation="swiglu", dropout=0.0,
)  # fmt: skip
RECIPE: dict[str, Any] = {"name": "test", "train": {"global_batch": 4}, "data": {"path": "x", "sequence_length": 16}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run with checkpoints of steps 10 and 20."""
    folder = tmp_path / "run"
    ranks = Ranks(0, 0, Layout({Axis.DATA: 1}), torch.device("cpu"))
    checkpointer = Checkpointer(folder / "checkpoints", ranks, 3, asynchronous=False)
    for step in (10, 20):
        shards = [
            StateShard(u, 0, u.numel, {name: torch.randn(u.numel) for name in ("master", "m", "v")})
            for u in model_units(CONFIG)
        ]
        assert checkpointer.save(step, shards, {}, {"recipe": RECIPE, "model": asdict(CONFIG)}) is None
    return folder


def ckpt(*arguments: object) -> Result:
    """Run the command."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def damage(path: Path) -> None:
    """Flip a bit of the file's last byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_list(run: Path) -> None:
    rows = json.loads(ckpt("list", run, "--json").stdout)
    assert [(row["step"], row["tokens"]) for row in rows] == [(20, 20 * 64), (10, 10 * 64)]
    assert rows[0]["parameters"] == parameter_count(CONFIG)
    assert rows[0]["bytes"] > 12 * parameter_count(CONFIG)
    text = ckpt("list", run / "checkpoints").stdout
    assert "1,280" in text
    assert "step-00000010" in text
    damage(run / "checkpoints" / "step-00000020" / "manifest.json")
    text = ckpt("list", run).stdout
    assert "step-00000020  damaged: manifest.json does not match" in text
    assert "640" in text


def test_inspect(run: Path) -> None:
    folder = run / "checkpoints" / "step-00000010"
    found = json.loads(ckpt("inspect", folder, "--json").stdout)
    assert found["step"] == 10
    assert found["recipe"] == RECIPE
    assert found["model"] == asdict(CONFIG)
    assert found["states"] == ["m", "master", "v"]
    assert found["files"].keys() == {"rank-00000.safetensors"}
    assert found["tensors"]["head.weight"]["shape"] == [65, 32]
    text = ckpt("inspect", run).stdout
    assert "step        20" in text
    assert re.search(r"head\.weight +65 x 32 +1\n", text)


def test_verify(run: Path) -> None:
    result = ckpt("verify", run)
    assert result.exit_code == 0
    assert result.stdout.count("sound") == 2
    damage(run / "checkpoints" / "step-00000020" / "rank-00000.safetensors")
    result = ckpt("verify", run)
    assert result.exit_code == 1
    assert isinstance(result.exception, RunFailedError)
    assert str(result.exception).startswith("1 of 2 checkpoints")
    assert str(result.exception).endswith("are damaged; remove them: a run resumes from the newest sound one")
    assert "rank-00000.safetensors does not match its checksum at head.norm.weight (v)" in result.stdout
    assert json.loads(ckpt("verify", run / "checkpoints" / "step-00000010", "--json").stdout).popitem()[1] == []


def test_convert_there_and_back(run: Path, tmp_path: Path) -> None:
    exported = ckpt("convert", run, tmp_path / "hf", "--max-shard-size", "5KB")
    assert exported.exit_code == 0
    assert "step-00000020" in exported.stdout
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    made = json.loads(ckpt("convert", tmp_path / "hf", tmp_path / "new", "--json").stdout)
    assert (made["kind"], made["folder"]) == ("checkpoint", str(tmp_path / "new"))
    (row,) = json.loads(ckpt("list", tmp_path / "new", "--json").stdout)
    assert (row["step"], row["tokens"], row["states"]) == (0, None, ["master"])
    assert ckpt("verify", tmp_path / "new").exit_code == 0
    assert "step" in ckpt("inspect", tmp_path / "new").stdout


def test_what_was_meant_by_a_folder_without_checkpoints(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").touch()
    assert f"`llmtrain ckpt convert {hf} FOLDER`" in str(ckpt("list", hf).exception)
    assert str(ckpt("list", tmp_path).exception).endswith(f"holds no checkpoint; did you mean {run}?")
    monkeypatch.chdir(tmp_path)
    run.rename(tmp_path / "runs")
    Path("runs/first").mkdir()
    assert str(ckpt("list", "first").exception) == "first is not a folder; did you mean runs/first?"


def test_arguments_of_convert_are_checked_without_torch(run: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for words, said in (
        ([str(run), str(tmp_path / "full")], "exists already"),
        ([str(tmp_path / "texts"), str(tmp_path / "new")], "holds neither a checkpoint nor a Hugging Face model"),
        ([str(run), str(tmp_path / "new"), "--tokenizer", str(tmp_path / "texts")], "which holds no tokenizer"),
    ):
        code = (
            "import sys; from llmtrain.cli.main import main; "
            f"code = main({['ckpt', 'convert', *words]!r}); sys.exit(100 if 'torch' in sys.modules else code)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("command", ["list", "inspect", "verify"])
def test_no_checkpoint_there(tmp_path: Path, command: str) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        result = ckpt(command, path)
        assert isinstance(result.exception, BadInputError)
        assert str(path) in str(result.exception)
