"""`llmtrain eval` and `llmtrain generate`: one sentence names whatever does not fit the model."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from llmtrain.checkpoint.save import Checkpointer
from llmtrain.checkpoint.state_shard import StateShard
from llmtrain.cli.main import main
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import Ranks
from llmtrain.inference import open as open_module
from llmtrain.inference import trained
from llmtrain.inference.generate import Sampling, draw
from llmtrain.model.config import GPTConfig
from llmtrain.model.tensors import model_units
from llmtrain_data.checksums import Encoding
from llmtrain_data.indexed import IndexedWriter
from llmtrain_data.tokenizer import tokenizer_identity
from tokenizers import Tokenizer, models, pre_tokenizers

CONFIG = GPTConfig(
    family="llama", layers=1, hidden=32, heads=4, kv_heads=2, ffn=64, positions=32, vocab=65, tie_embeddings=False,
    norm_eps=1e-5, rope_theta=1e4, rotary_fraction=1.0, activation="swiglu", dropout=0.0,
)  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A checkpoint of a model with 65 tokens, without a recipe."""
    return saved(tmp_path, 1.0)


def saved(tmp_path: Path, scale: float) -> str:
    ranks = Ranks(0, 0, Layout({Axis.DATA: 1}), torch.device("cpu"))
    shards = [StateShard(u, 0, u.numel, {"master": scale * torch.randn(u.numel)}) for u in model_units(CONFIG)]
    about = {"recipe": {}, "model": asdict(CONFIG)}
    assert Checkpointer(tmp_path / "checkpoints", ranks, 1, asynchronous=False).save(0, shards, {}, about) is None
    return str(tmp_path)


def test_of_a_checkpoints_recipe_only_the_data_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(0, 0, Layout({Axis.DATA: 1}), torch.device("cpu"))
    shards = [StateShard(u, 0, u.numel, {"master": torch.randn(u.numel)}) for u in model_units(CONFIG)]
    writer = IndexedWriter(tmp_path / "set", np.dtype(np.uint16))
    writer.add(np.zeros(500, dtype=np.uint16), np.array([500]))
    writer.commit()
    recipe: dict[str, Any] = {
        "name": "run",
        "model": {"preset": "gpt2-1m"},
        "data": {"path": str(tmp_path / "set"), "sequence_length": 16},
        "train": {"key of another version": 1},
        "cluster": {"node": {"ranks": 1}, "accelerator": {"peak": {"a format of another version": "1TFLOP/s"}}},
    }
    about: dict[str, Any] = {"recipe": recipe, "model": asdict(CONFIG)}
    assert Checkpointer(tmp_path / "checkpoints", ranks, 1, asynchronous=False).save(0, shards, {}, about) is None
    assert main(["eval", str(tmp_path), "--split", "train"]) == 0
    capsys.readouterr()
    about["recipe"] = {"data": {**recipe["data"], "other": 1}}
    assert Checkpointer(tmp_path / "checkpoints", ranks, 1, asynchronous=False).save(1, shards, {}, about) is None
    said = refused(capsys, "eval", str(tmp_path), "--split", "train")
    assert "a recipe that this version cannot read, data.other: Unexpected" in said
    words = ("--tokenizer", tokenizer(tmp_path / "own", 65), "--prompt", "1", "--max-tokens", "1")
    assert main(["generate", str(tmp_path), *words]) == 0


def test_texts_end_with_any_token_of_the_generation_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, stops = Path(tokenizer(tmp_path / "own", 65)), list[set[int]]()
    monkeypatch.setattr("llmtrain.inference.trained.generate", lambda *given: iter(stops.append(given[-1]) or ()))
    words = ("generate", saved(tmp_path / "run", 0.1), "--tokenizer", str(folder), "--prompt", "1")
    assert main(words) == 0
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert main(words) == 0
    assert stops == [stops[0], stops[0] | {3, 4}]


def test_fp16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = IndexedWriter(tmp_path / "set", np.dtype(np.uint16))
    writer.add(np.arange(500) % 65, np.array([500]))
    writer.commit()
    model, losses = saved(tmp_path / "run", 0.1), []
    for dtype in ("fp32", "fp16"):
        assert main(["eval", model, "--data", str(tmp_path / "set"), "--dtype", dtype, "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[1] != losses[0]
    words = ("--tokenizer", tokenizer(tmp_path / "own", 65), "--prompt", "1", "--max-tokens", "3")
    assert main(["generate", model, *words, "--dtype", "fp16"]) == 0


def test_a_run_without_a_sound_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        folder = tmp_path / f"checkpoints/step-0000000{step}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    assert main(["eval", str(tmp_path)]) == 1
    *skipped, said = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    none = f"none of the checkpoints in {tmp_path} is sound, see above"
    assert said == f"llmtrain: {none}; give another run or checkpoint"
    assert sum("skipped the checkpoint" in line for line in skipped) == 2


def tokenizer(folder: Path, size: int) -> str:
    """A tokenizer whose words are its ids."""
    folder.mkdir()
    made = Tokenizer(models.WordLevel({str(number): number for number in range(size)}, unk_token="0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return str(folder)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    out, error = capsys.readouterr()
    assert (out, len(error.splitlines())) == ("", 1)
    return error


def test_triton_without_a_compiler(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_module, "find_spec", lambda name: name)
    monkeypatch.setattr("llmtrain.comm.device.gpu_count", lambda: 1)
    monkeypatch.setattr("llmtrain.launch.gpus.shutil.which", lambda name: None)
    for command in ("eval", "generate"):
        assert refused(capsys, command, model).endswith("this machine has none; apt install gcc, or set CC\n")


@pytest.mark.parametrize(("tokens", "said"), [(65, None), (66, "holds id 65 at token 65 of document 0; expected 0 to")])
def test_data_of_another_vocabulary(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], tokens: int, said: str | None
) -> None:
    writer = IndexedWriter(tmp_path / "set", np.dtype(np.uint16))
    for _ in range(10):
        writer.add(np.arange(tokens), np.array([tokens]))
    writer.commit()
    words = ("eval", model, "--data", str(tmp_path / "set"), "--split", "train")
    if said is None:
        assert main(words) == 0
    else:
        assert said in refused(capsys, *words)


@pytest.mark.parametrize("own", [True, False], ids=["the model's tokenizer", "another"])
def test_data_of_another_tokenizer(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], own: bool) -> None:
    """Ids of another tokenizer may all be in the vocabulary."""
    folder = tokenizer(Path(model) / "tokenizer", 65)
    encoding = Encoding(tokenizer_identity(folder) + (not own), None)
    writer = IndexedWriter(tmp_path / "set", np.dtype(np.uint16), encoding)
    writer.add(np.arange(65), np.array([65]))
    writer.commit()
    words = ("eval", model, "--data", str(tmp_path / "set"))
    if own:
        assert main(words) == 0
    else:
        said = f"the set {tmp_path / 'set'} was prepared with another tokenizer than the model's, {folder}; prepare"
        assert said in refused(capsys, *words)
    file = Path(folder, "tokenizer.json").rename(Path(folder, "tokenizer.model"))
    # Nothing reads that one.
    assert main(words) == 0
    file.rename(file.with_name("tokenizer.json"))


def test_data_that_was_relative_to_another_folder(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "set.bin").touch()
    run = {"cwd": str(tmp_path / "there")}
    monkeypatch.setattr("llmtrain.inference.trained.read_run_file", lambda folder: run if str(folder) == model else {})
    said = refused(capsys, "eval", model, "--data", "set")
    assert f"there is no file set.bin; there is one in {tmp_path / 'there'}: run from there, or give" in said


def test_a_folder_of_texts_is_no_prepared_set(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    said = refused(capsys, "eval", model, "--data", str(tmp_path / "texts"))
    assert f"prepare it with `llmtrain data prepare {tmp_path / 'texts'} --tokenizer DIR" in said


@pytest.mark.parametrize("top_p", [0.0, 1e-60])
def test_the_most_likely_token_always_stays(top_p: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = [*torch.randn(20, 65, generator=generator), torch.tensor([1.0, 3.0, 2.0, 3.0]), torch.zeros(65)]
    for temperature, top_k in ((1.0, 0), (0.5, 50), (3.0, 1)):
        drawn = [draw(each, Sampling(temperature, top_k, top_p), generator) for each in logits]
        assert drawn == [int(each.argmax()) for each in logits]


def test_a_temperature_near_0_takes_the_most_likely_token() -> None:
    generator, logits = torch.Generator().manual_seed(0), torch.tensor([1.0, 3.0, 2.0])
    assert draw(logits, Sampling(temperature=1e-300), generator) == 1


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--temperature", "nan", "--temperature is nan; expected a number"),
        ("--top-p", "nan", "--top-p is nan; expected a number"),
        ("--seed", "1" + 23 * "0", "--seed"),
        ("--seed", "-1", "--seed"),
    ],
)
def test_numbers_that_nothing_can_be_drawn_with(
    option: str, value: str, said: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, "generate", model, option, value)


def test_tokenizers_that_do_not_go_with_the_model(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate = ("generate", model, "--max-tokens", "3", "--tokenizer")
    assert main((*generate, tokenizer(tmp_path / "own", 65), "--prompt", "1 64")) == 0
    assert capsys.readouterr().out.startswith("1 64")
    larger = tokenizer(tmp_path / "larger", 90)
    assert "makes token 89 of the prompt, but the" in refused(capsys, *generate, larger, "--prompt", "1 89")
    said = refused(capsys, "generate", model, "--prompt", "x")
    assert f"there is no tokenizer beside {model}/checkpoints/step-00000000; name its folder with --tokenizer" in said
    (tmp_path / "empty").mkdir()
    said = refused(capsys, *generate, str(tmp_path / "empty"), "--prompt", "x")
    assert f"{tmp_path / 'empty'} holds no usable Hugging Face tokenizer" in said


def test_a_model_that_diverged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = IndexedWriter(tmp_path / "set", np.dtype(np.uint16))
    writer.add(np.arange(65), np.array([65]))
    writer.commit()
    assert main(["eval", saved(tmp_path / "large", 1e3), "--data", str(tmp_path / "set"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] > 1000
    assert found["perplexity"] is None
    words = ("--tokenizer", tokenizer(tmp_path / "own", 65), "--prompt", "1")
    assert main(["generate", saved(tmp_path / "not a number", math.nan), *words]) == 1
    assert "the model's logits are not finite numbers; its training diverged" in capsys.readouterr().err


def test_a_prompt_in_another_encoding(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = b"caf\xe9".decode(errors="surrogateescape")
    said = refused(capsys, "generate", model, "--tokenizer", tokenizer(tmp_path / "own", 65), "--prompt", prompt)
    assert "--prompt is not UTF-8 text" in said


def test_sequences_shorter_than_the_positions(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An imported model may have more positions than a set has tokens, or a machine has memory for."""
    writer = IndexedWriter(tmp_path / "set", np.dtype(np.uint16))
    writer.add(np.arange(33), np.array([33]))
    writer.commit()
    words = ("eval", model, "--data", str(tmp_path / "set"), "--json")
    for given, length, samples in (((), 32, 1), (("--sequence-length", "8"), 8, 4)):
        assert main([*words, *given]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["sequence_length"], found["samples"]) == (length, samples)
    said = refused(capsys, *words, "--sequence-length", "33")
    assert "--sequence-length is 33; expected at most the model's positions, 32" in said


def test_a_text_that_ends_with_a_replacement_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data has them in place of bytes that are no UTF-8, so a model may generate them."""
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "\ufffd": 2}, unk_token="one"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(trained, "generate", lambda *rest: iter((1, 2)))
    model = SimpleNamespace(
        model=SimpleNamespace(config=CONFIG), tokenizer=tmp_path, data=None, notice=lambda: None, folder=tmp_path
    )
    shown = trained.complete(model, "one", 2, Sampling(), None)  # type: ignore[arg-type]
    assert "".join(shown) == "one two \ufffd"
