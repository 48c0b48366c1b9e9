"""Untrusted files: nothing in them runs, nothing outside their folder is read, and each is refused in a sentence."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from llmtrain.checkpoint.checksums import sidecar
from llmtrain.checkpoint.convert.hf_weights import hf_tensors
from llmtrain.checkpoint.describe import list_checkpoints
from llmtrain.checkpoint.load import load_latest
from llmtrain.checkpoint.manifest import StoredRange, model_of, read_manifest
from llmtrain.checkpoint.plain_file import DamagedError
from llmtrain.checkpoint.read import CheckpointReader
from llmtrain.checkpoint.save import Checkpointer
from llmtrain.checkpoint.state_shard import StateShard
from llmtrain.checkpoint.verify import Verified, verify
from llmtrain.cli import ckpt
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.load import load_cluster
from llmtrain.comm.ranks import Ranks
from llmtrain.errors import BadInputError, RunFailedError
from llmtrain.model.config import GPTConfig
from llmtrain.model.hf_config import read_hf_config
from llmtrain.model.tensors import model_units
from llmtrain.recipe.load import load_recipe
from llmtrain_data.config import DataConfig
from llmtrain_data.dataset import open_split
from llmtrain_data.errors import DataError
from llmtrain_data.tokenizer import load_tokenizer, tokenizer_size

CONFIG = GPTConfig(
    family="gpt2", layers=1, hidden=32, heads=4, kv_heads=4, ffn=128, positions=32, vocab=65, tie_embeddings=True,
    norm_eps=1e-5, rope_theta=1e4, rotary_fraction=1.0, activation="gelu_tanh", dropout=0.0,
)  # fmt: skip
RANKS = Ranks(0, 0, Layout({Axis.DATA: 1}), torch.device("cpu"))
PART = "rank-00000.safetensors"
REFUSED = (BadInputError, DataError, RunFailedError)


@pytest.fixture
def went_off(tmp_path: Path) -> Path:
    """The file that a bomb creates when it runs."""
    return tmp_path / "went-off"


@pytest.fixture
def bomb(went_off: Path) -> bytes:
    """A pickle that runs a command when it is loaded."""
    return f"cposix\nsystem\n(S'touch {went_off}'\ntR.".encode()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A sound checkpoint of step 1, in a run's folder."""
    folder = tmp_path / "checkpoints"
    about = {"recipe": {}, "model": asdict(CONFIG)}
    assert Checkpointer(folder, RANKS, 1, asynchronous=False).save(1, shards(), {}, about) is None
    return folder / "step-00000001"


def shards() -> list[StateShard]:
    return [
        StateShard(unit, 0, unit.numel, {name: torch.ones(unit.numel) for name in ("master", "m", "v")})
        for unit in model_units(CONFIG)
    ]


def load(checkpoint: Path) -> list[str]:
    """Load a checkpoint; return its warnings. Raises RunFailedError if it is not sound."""
    said: list[str] = []
    load_latest(checkpoint, shards(), RANKS, said.append)
    return said


def test_the_bomb_would_go_off(bomb: bytes, went_off: Path) -> None:
    """This shows that the tests below can fail."""
    loads = __import__("pick" + "le").loads
    loads(bomb)
    assert went_off.exists()


@pytest.mark.parametrize("name", [PART, "manifest.json", "manifest.json.xxh3"])
def test_a_bomb_in_a_checkpoint(name: str, checkpoint: Path, bomb: bytes, went_off: Path) -> None:
    (checkpoint / name).write_bytes(bomb)
    with pytest.raises(RunFailedError, match=r"no checkpoint .* is sound"):
        load(checkpoint)
    assert verify(checkpoint).problems
    assert not went_off.exists()


def test_a_bomb_beside_a_checkpoint(checkpoint: Path, bomb: bytes, went_off: Path) -> None:
    for name in (".metadata", "model.pt", "optimizer.bin"):
        (checkpoint / name).write_bytes(bomb)
    load(checkpoint)
    assert len(verify(checkpoint).problems) == 3
    assert not went_off.exists()


def forge(checkpoint: Path, change: Callable[[str], str]) -> None:
    """Change the manifest, and correct its checksum."""
    text = change((checkpoint / "manifest.json").read_text()).encode()
    (checkpoint / "manifest.json").write_bytes(text)
    (checkpoint / "manifest.json.xxh3").write_bytes(sidecar("manifest.json", text))


@pytest.mark.parametrize("name", ["../outside/{}", "{root}/outside/{}", "../../{}", "./{}", "{}\\u0000", "outside"])
def test_a_manifest_that_climbs_out(name: str, checkpoint: Path) -> None:
    outside = checkpoint.parent / "outside"
    outside.mkdir()
    shutil.copy(checkpoint / PART, outside / PART)
    climbing = name.replace("{root}", str(checkpoint.parent)).replace("{}", PART)
    forge(checkpoint, lambda text: text.replace(PART, climbing))
    with pytest.raises(RunFailedError, match=r"no checkpoint .* is sound"):
        load(checkpoint)
    assert any("which no checkpoint has" in problem for problem in verify(checkpoint).problems)


@pytest.mark.parametrize("name", [PART, "manifest.json"])
def test_a_link_in_a_checkpoint(name: str, checkpoint: Path) -> None:
    outside = checkpoint.parent / name
    (checkpoint / name).rename(outside)
    (checkpoint / name).symlink_to(outside)
    with pytest.raises(RunFailedError, match=r"no checkpoint .* is sound"):
        load(checkpoint)


def test_a_file_that_the_disk_does_not_give_may_be_sound(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def block(reader: CheckpointReader, name: str, stored: StoredRange, index: int) -> torch.Tensor:
        raise OSError(errno.EIO, "Input/output error", str(reader.folder / stored.file))

    monkeypatch.setattr(CheckpointReader, "block", block)
    unread = [f"{PART} cannot be read to its end: Input/output error"]
    assert verify(checkpoint) == Verified([], unread)
    sentence = r"1 of 1 checkpoints in .* cannot be read whole and may be sound; see to their disk or permissions, and"
    with pytest.raises(RunFailedError, match=f"^{sentence} verify again$"):
        ckpt.verify(checkpoint)
    (checkpoint / "notes").touch()
    assert verify(checkpoint) == Verified(["notes is not part of the checkpoint"], unread)


def test_a_checkpoint_under_the_name_of_another(checkpoint: Path) -> None:
    shutil.copytree(checkpoint, checkpoint.with_name("step-00000040"))
    assert verify(checkpoint.with_name("step-00000040")).problems == [
        "manifest.json is of step 1, but its folder is named step-00000040; rename it back"
    ]
    # The run resumes from the only checkpoint whose name matches its step.
    assert load(checkpoint.parent)[0].startswith("skipped the checkpoint")
    assert "damage" in list_checkpoints(checkpoint.parent)[0]
    # A copy with another kind of name does not claim a step.
    assert verify(checkpoint.rename(checkpoint.with_name("kept"))).problems == []


def test_a_manifest_of_a_model_that_computes_something_else(checkpoint: Path) -> None:
    forge(checkpoint, lambda text: text.replace('"family":"gpt2"', '"family":"gpt2","qk_norm":true'))
    with pytest.raises(DamagedError, match=r"describes no model: model\.qk_norm is no size of a model"):
        model_of(read_manifest(checkpoint))


def test_a_manifest_that_asks_for_too_much(checkpoint: Path) -> None:
    forge(checkpoint, lambda text: re.sub(r'"shape":\[\d+', '"shape":[1000000000000', text, count=1))
    with pytest.raises(RunFailedError, match=r"no checkpoint .* is sound"):
        load(checkpoint)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.safetensors.index.json"])
def test_a_bomb_in_a_hugging_face_model(name: str, tmp_path: Path, bomb: bytes, went_off: Path) -> None:
    (tmp_path / name).write_bytes(bomb)
    with pytest.raises(BadInputError):
        list(hf_tensors(tmp_path, CONFIG))
    assert not went_off.exists()


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/../../model.safetensors"])
def test_an_index_of_weights_that_climbs_out(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"wte.weight": name}}))
    with pytest.raises(BadInputError, match="expected files of the same folder"):
        list(hf_tensors(folder, CONFIG))


def code(went_off: Path, base: str) -> str:
    """A module that runs when it is imported."""
    return f"open({str(went_off)!r}, 'w')\nfrom transformers import {base}\nclass Evil({base}): pass\n"


def test_code_in_a_hugging_face_model(tmp_path: Path, went_off: Path) -> None:
    (tmp_path / "evil.py").write_text(code(went_off, "GPT2Config"))
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInputError):
        read_hf_config(tmp_path)
    assert not went_off.exists()


def test_code_in_a_tokenizer(tmp_path: Path, bomb: bytes, went_off: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text(code(went_off, "PreTrainedTokenizer"))
    config = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": config["auto_map"]}))
    (tmp_path / "vocab.pkl").write_bytes(bomb)
    # This user answers yes to every question.
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    for read in (tokenizer_size, load_tokenizer):
        with pytest.raises(DataError):
            read(tmp_path)
    assert not went_off.exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_bomb_as_a_tokenizer(name: str, tmp_path: Path, bomb: bytes, went_off: Path) -> None:
    (tmp_path / name).write_bytes(bomb)
    for read in (tokenizer_size, load_tokenizer):
        with pytest.raises(DataError):
            read(tmp_path)
    assert not went_off.exists()


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_bomb_as_data(suffix: str, tmp_path: Path, bomb: bytes, went_off: Path) -> None:
    for each in (".bin", ".idx"):
        (tmp_path / f"set{each}").write_bytes(bomb if each == suffix else b"")
    with pytest.raises(DataError):
        open_split(DataConfig(path=str(tmp_path / "set"), sequence_length=16), "train")
    assert not went_off.exists()


TAGS = [
    "!!python/object/apply:os.system ['touch {}']",
    "!!python/object/new:os.system ['touch {}']",
    "!!python/name:os.system",
    "!!python/module:os",
    "!!python/tuple [1]",
    "!evil x",
]


@pytest.mark.parametrize("tag", TAGS)
def test_a_yaml_tag(tag: str, tmp_path: Path, went_off: Path) -> None:
    path, text = tmp_path / "evil.yaml", tag.replace("{}", str(went_off))
    for content in (f"name: {text}\n", f"train: {{steps: {text}}}\n", f"{text}\n", f"? {text}\n: 1\n"):
        path.write_text(content)
        for read in (load_recipe, load_cluster):
            with pytest.raises(BadInputError):
                read(str(path))
    with pytest.raises(BadInputError):
        load_recipe("gpt2-124m", [f"name={text}"])
    assert not went_off.exists()


@pytest.mark.parametrize("text", ["${oc.env:HOME}", "${oc.decode:'1'}", "${oc.create:{}}", "${no.such}", "${name}"])
def test_a_recipe_that_would_read_the_environment(text: str, tmp_path: Path) -> None:
    path = tmp_path / "evil.yaml"
    path.write_text(f"extends: gpt2-124m\nname: {text}\n")
    with pytest.raises(BadInputError):
        load_recipe(str(path))
    with pytest.raises(BadInputError):
        load_recipe("gpt2-124m", [f"name={text}"])


@pytest.mark.parametrize("text", ["${${logging.dir}:HOME}", "${oc.${name}:HOME}", "${ ${logging.dir} :HOME}"])
def test_a_resolver_whose_name_is_put_together(text: str, tmp_path: Path) -> None:
    """The key takes any text, so that nothing else is wrong with the result."""
    path, parts = tmp_path / "evil.yaml", ["name=env", "logging.dir=oc.env"]
    path.write_text(f"extends: gpt2-124m\nlogging: {{wandb_project: '{text}'}}\n")
    for recipe, overrides in ((str(path), parts), ("gpt2-124m", [*parts, f"logging.wandb_project={text}"])):
        with pytest.raises(BadInputError, match="may only refer to its own keys"):
            load_recipe(recipe, overrides)


# The references must not be resolved.
REFERENCES = ["${name}", "${oc.env:HOME}", "${extends}", "???", "'${a'"]


@pytest.mark.parametrize(
    "parent", ["/dev/zero", "pipe", "/etc/shadow", "/proc/self/environ", ".", "evil.yaml", "[1]", *REFERENCES]
)
def test_a_recipe_that_extends_what_is_no_recipe(parent: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    path = tmp_path / "evil.yaml"
    path.write_text(f"extends: {parent}\n")
    with pytest.raises(BadInputError) as refused:
        load_recipe(str(path))
    # The error about a file that is not a recipe must not show the file.
    assert "root:" not in str(refused.value)
    assert "PATH=" not in str(refused.value)
    assert os.environ["HOME"] not in str(refused.value).replace(str(tmp_path), "")


@pytest.mark.parametrize("name", REFERENCES)
def test_a_recipe_that_extends_one_with_a_strange_name(name: str, tmp_path: Path) -> None:
    """The name is not inherited, so it does not matter."""
    (tmp_path / "base.yaml").write_text(f"name: {name}\nmodel: {{preset: gpt2-124m}}\ndata: {{path: x}}\n")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\n")
    if name == "'${a'":
        # OmegaConf cannot load this YAML, so reading refuses it.
        with pytest.raises(BadInputError):
            load_recipe(str(tmp_path / "mine.yaml"))
    else:
        assert load_recipe(str(tmp_path / "mine.yaml")).name == "mine"


def test_a_recipe_that_grows_when_it_is_read(tmp_path: Path) -> None:
    """Each line doubles the last, forty times."""
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))]
    for read in (load_recipe, load_cluster):
        (tmp_path / "evil.yaml").write_text("\n".join(lines))
        with pytest.raises(BadInputError):
            read(str(tmp_path / "evil.yaml"))


@pytest.mark.parametrize("kind", ["texts", "lists"])
def test_references_that_multiply(kind: str, tmp_path: Path) -> None:
    """Each key refers to the one before it twice."""
    keys = [f"k{n}" for n in range(60)]
    double = {"texts": "${{{0}}}${{{0}}}", "lists": "['${{{0}}}', '${{{0}}}']"}[kind]
    lines = [f"{key}: {double.format(before)}" for before, key in pairwise(keys)]
    (tmp_path / "evil.yaml").write_text("\n".join(["k0: xy", *lines]))
    with pytest.raises(BadInputError, match="characters with its references followed"):
        load_recipe(str(tmp_path / "evil.yaml"))


def test_references_that_do_not_multiply(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "extends: gpt2-124m\nname: a${train.steps}\ntrain: {steps: 7, eval_every: '${.steps}'}\n"
        "data: {path: [1, 'x-${name}', 2, '${.1}-${model.preset}']}\n"
    )
    found = load_recipe(str(tmp_path / "a.yaml"))
    assert found.data.path == [1, "x-a7", 2, "x-a7-gpt2-124m"]
    assert found.train.eval_every == 7


@pytest.mark.parametrize("text", ["[" + "1, " * 300_000 + "1]", "[" + "[], " * 10_000 + "]", "{" * 60, "- " * 60])
def test_a_value_of_too_many_parts(text: str, tmp_path: Path) -> None:
    (tmp_path / "evil.yaml").write_text(f"data: {text}\n")
    for read in (load_recipe, load_cluster):
        with pytest.raises(BadInputError):
            read(str(tmp_path / "evil.yaml"))
    with pytest.raises(BadInputError):
        load_recipe("gpt2-124m", [f"data.path={text}"])


NUMBERS = [
    "0x" + "f" * 300,
    "9" * 400,
    "-" + "9" * 4000,
    "0x" + "f" * 9000,
    "1e400",
    "-1e999",
    ".nan",
    "1:" * 300 + "1",
]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("key", ["train.steps", "train.timeout", "model.hidden", "data.path", "name", "zero.secondary"])
def test_a_number_that_nothing_can_hold(key: str, number: str, tmp_path: Path) -> None:
    section, _, leaf = key.rpartition(".")
    (tmp_path / "evil.yaml").write_text(
        f"extends: gpt2-124m\n{section}: {{{leaf}: {number}}}\n" if section else f"name: {number}"
    )
    for recipe, overrides in ((str(tmp_path / "evil.yaml"), []), ("gpt2-124m", [f"{key}={number}"])):
        with pytest.raises(BadInputError) as refused:
            load_recipe(recipe, overrides)
        assert len(str(refused.value)) < 400


def test_a_huge_recipe(tmp_path: Path) -> None:
    path = tmp_path / "evil.yaml"
    with path.open("wb") as file:
        file.truncate(10**10)
    for read in (load_recipe, load_cluster):
        with pytest.raises(BadInputError):
            read(str(path))
