"""Conversion to and from Hugging Face folders, compared with transformers' own models."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llmtrain.checkpoint.convert.convert import convert
from llmtrain.checkpoint.convert.hf_weights import hf_tensors
from llmtrain.checkpoint.convert.tokenizer import special_tokens
from llmtrain.checkpoint.load import load_latest
from llmtrain.checkpoint.save import Checkpointer
from llmtrain.checkpoint.state_shard import StateShard
from llmtrain.checkpoint.verify import verify
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import Ranks
from llmtrain.errors import BadInputError, RunFailedError
from llmtrain.model.hf_config import read_hf_config, to_hf_config
from llmtrain.model.tensors import model_units
from llmtrain_data.tokenizer import END_OF_TEXT
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging

RANKS = Ranks(0, 0, Layout({Axis.DATA: 1}), torch.device("cpu"))
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61,
    "max_position_embeddings": 24,
}  # fmt: skip
# Of the frequencies of a head of 12 channels, one stays, one is between and four are scaled.
SCALING: dict[str, Any] = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
GPT2_SIZES: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 24}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SIZES)),
    "gpt2-untied": lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SIZES, n_inner=80, tie_word_embeddings=False)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama-scaled": lambda: LlamaForCausalLM(LlamaConfig(**SIZES | {"rope_scaling": {**SCALING}})),
    "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
}


def hf_folder(kind: str, folder: Path) -> Path:
    """Save a small model with random weights, biases and norms: zeros and ones would hide swapped tensors."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(1)
    model = MODELS[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a folder's files."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("kind", MODELS)
def test_imported_and_exported_again(tmp_path: Path, kind: str) -> None:
    source = hf_folder(kind, tmp_path / "hf")
    convert(source, tmp_path / "run", "fp32", "5GB", None)
    convert(tmp_path / "run", tmp_path / "back", "fp32", "9KB", None)
    before, after = weights(source), weights(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 3

    theirs = AutoModelForCausalLM.from_pretrained(source)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    ours, info = loaded
    assert not any(info.values())
    prompt = torch.randint(0, 61, (2, 6))
    expected = theirs.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(ours.generate(prompt, max_new_tokens=12, do_sample=False), expected)
    assert read_hf_config(tmp_path / "back") == read_hf_config(source)


@pytest.mark.parametrize("kind", MODELS)
def test_a_run_starts_from_an_import_and_exports_what_it_learned(tmp_path: Path, kind: str) -> None:
    source = hf_folder(kind, tmp_path / "hf")
    config = read_hf_config(source)
    convert(source, tmp_path / "run", "fp32", "5GB", None)
    units = model_units(config)
    shards = [StateShard(u, 0, u.numel, {name: torch.ones(u.numel) for name in ("master", "m")}) for u in units]
    assert load_latest(tmp_path / "run", shards, RANKS, print, config) == {"step": 0}
    imported = dict(hf_tensors(source, config))
    assert len(imported) == sum(len(unit.tensors) for unit in units)
    for unit, shard in zip(units, shards, strict=True):
        assert not shard.states["m"].any()
        for tensor, first, last in unit.tensor_ranges(0, unit.numel):
            start = unit.offsets[unit.tensors.index(tensor)]
            values = shard.states["master"][start : start + last - first].view(tensor.shape)
            assert torch.equal(values, imported[tensor.name])
        shard.states["master"].mul_(2)
    folder = tmp_path / "run" / "checkpoints"
    about = {"recipe": {}, "model": asdict(config)}
    assert Checkpointer(folder, RANKS, 1, asynchronous=False).save(7, shards, {}, about) is None
    convert(folder, tmp_path / "hf7", "bf16", "5GB", None)
    before, after = weights(source), weights(tmp_path / "hf7")
    assert all(torch.equal(after[name], (2 * before[name]).bfloat16()) for name in before)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf7").dtype == torch.bfloat16


def test_files_of_older_versions(tmp_path: Path) -> None:
    config = read_hf_config(hf_folder("gpt2", tmp_path / "hf"))
    expected = dict(hf_tensors(tmp_path / "hf", config))
    tensors = weights(tmp_path / "hf")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 24, 24), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    save_file({**bare, **masks, "lm_head.weight": tensors["transformer.wte.weight"].clone()}, _file(tmp_path))
    found = dict(hf_tensors(tmp_path / "hf", config))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _file(tmp_path: Path) -> Path:
    return tmp_path / "hf" / "model.safetensors"


def _without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: _without(t, NORM), "lacks the tensor model.norm.weight"),
        (lambda t: {**t, NORM: torch.ones(31)}, "has shape [31]; its config.json says [32]"),
        (lambda t: {**t, NORM: torch.ones(32, dtype=torch.int8)}, "is of type I8"),
        (lambda t: {**t, "model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, "q_norm.weight, which our llama"),
    ],
)
def test_weights_that_are_not_the_models(tmp_path: Path, change: Callable[[Any], Any], expected: str) -> None:
    source = hf_folder("llama", tmp_path / "hf")
    save_file(change(weights(source)), _file(tmp_path))
    with pytest.raises(BadInputError) as error:
        convert(source, tmp_path / "run", "fp32", "5GB", None)
    assert expected in str(error.value)
    assert not list(tmp_path.glob("run*"))


def test_only_safetensors_of_the_folder_itself(tmp_path: Path) -> None:
    source = hf_folder("llama", tmp_path / "hf")
    _file(tmp_path).write_bytes(_file(tmp_path).read_bytes()[:-3])
    for content, expected in (
        (None, "cannot be read as a safetensors file"),
        ({"weight_map": {"a": "../model.safetensors"}}, "expected files of the same folder"),
        ({"weight_map": []}, "cannot be read as an index"),
    ):
        if content is not None:
            _file(tmp_path).unlink(missing_ok=True)
            (source / "model.safetensors.index.json").write_text(json.dumps(content))
        with pytest.raises(BadInputError, match=expected):
            convert(source, tmp_path / "run", "fp32", "5GB", None)
    (source / "model.safetensors.index.json").unlink()
    (source / "pytorch_model.bin").touch()
    with pytest.raises(BadInputError, match="is a pickle"):
        convert(source, tmp_path / "run", "fp32", "5GB", None)


@pytest.mark.parametrize(
    ("kind", "change", "key"),
    [
        ("gpt2", {"activation_function": "relu"}, "activation_function"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"attn_pdrop": 0.0}, "attn_pdrop"),
        ("gpt2", {"architectures": ["GPT2DoubleHeadsModel"]}, "architectures"),
        ("gpt2", {"n_embd": "32"}, "n_embd"),
        ("gpt2", {"n_layer": -1}, "n_layer"),
        ("gpt2", {"vocab_size": None}, "vocab_size"),
        ("gpt2", {"model_type": "mixtral"}, "model_type"),
        ("gpt2", {"n_head": 5}, "model.heads"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position_embeddings"),
        ("llama", {"rope_scaling": SCALING | {"high_freq_factor": 1.0}}, "low_freq_factor"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters.rope_type"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type"),
        ("llama", {"rope_parameters": {"rope_theta": "big"}}, "rope_theta"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"head_dim": 16}, "head_dim"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("neox", {"use_parallel_residual": False}, "use_parallel_residual"),
        ("neox", {"attention_bias": False}, "attention_bias"),
        ("neox", {"hidden_act": "relu"}, "hidden_act"),
        ("neox", {"hidden_dropout": 0.5}, "hidden_dropout"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout"),
    ],
)
def test_what_our_model_would_compute_differently(tmp_path: Path, kind: str, change: dict, key: str) -> None:
    config = MODELS[kind]().config.to_dict() | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInputError) as error:
        read_hf_config(tmp_path)
    assert key in str(error.value)
    assert "config.json" in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000])
def test_a_config_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadInputError, match=r"config\.json"):
        read_hf_config(tmp_path)


def test_reading_a_config_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama"]().config.to_dict()))
    program = (
        "import sys, pathlib; from llmtrain.model.hf_config import read_hf_config; "
        "print(read_hf_config(pathlib.Path(sys.argv[1])).kv_heads, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["2", "False"]


def test_rope_is_read_in_both_spellings(tmp_path: Path) -> None:
    old = {"rotary_pct": 0.5, "rotary_emb_base": 500.0}
    new = {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 500.0, "rope_type": "default"}}
    found = []
    for spelling in (old, new):
        content = {"model_type": "gpt_neox", **SIZES, **spelling}
        (tmp_path / "config.json").write_text(json.dumps(content))
        found.append(read_hf_config(tmp_path))
        theirs = GPTNeoXConfig.from_pretrained(tmp_path).rope_parameters
        assert theirs is not None
        assert (theirs["rope_theta"], theirs["partial_rotary_factor"]) == (500.0, 0.5)
    assert found[0] == found[1]
    assert (found[0].rope_theta, found[0].rotary_fraction) == (500.0, 0.5)


@pytest.mark.parametrize("kind", MODELS)
def test_configs_mean_the_same_to_transformers(tmp_path: Path, kind: str) -> None:
    original = MODELS[kind]().config
    original.save_pretrained(tmp_path)
    config, special = read_hf_config(tmp_path), {"bos_token_id": None, "eos_token_id": None}
    # Dropout that transformers' Llama does not have is not exported as another one.
    dropped = to_hf_config(replace(config, dropout=0.1), "float32", special)
    assert {dropped[key] for key in dropped if "drop" in key} == {0.0 if config.family == "llama" else 0.1}
    contents = to_hf_config(config, "float32", special)
    (tmp_path / "config.json").write_text(json.dumps(contents))
    theirs = type(original).from_pretrained(tmp_path).to_dict()
    ignored = {"bos_token_id", "eos_token_id", "dtype", "architectures", "n_inner", "_name_or_path"}
    expected = original.to_dict()
    assert {k: v for k, v in theirs.items() if k not in ignored} == {
        k: v for k, v in expected.items() if k not in ignored
    }


@pytest.mark.parametrize(
    ("token", "settings"),
    [
        ("<|end|>", {"tokenizer_config.json": {"eos_token": {"content": "<|end|>"}}}),
        ("<|end|>", {"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": "<|end|>"}}),
        ("<|endoftext|>", {"tokenizer_config.json": {"model_max_length": 1024}}),
    ],
    ids=["configured", "in the map", "not configured"],
)
def test_tokenizer_and_generation_config_travel(
    token: str, settings: dict[str, dict[str, object]], tmp_path: Path
) -> None:
    source = hf_folder("llama", tmp_path / "hf")
    (source / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 3, "content": token}]}))
    for name, content in settings.items():
        (source / name).write_text(json.dumps(content))
    (source / "generation_config.json").unlink()
    convert(source, tmp_path / "run", "fp32", "5GB", None)
    convert(tmp_path / "run", tmp_path / "back", "fp32", " 5gb ", None)
    assert (tmp_path / "back/tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
    # Without a class, transformers would take that of the model's kind, which replaces parts of tokenizer.json.
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **({"eos_token": token} if token == END_OF_TEXT else {})}
    for name, content in settings.items():
        more = named if name == "tokenizer_config.json" else {}
        assert json.loads((tmp_path / "back" / name).read_text()) == {**more, **content}
    for name in ("config.json", "generation_config.json"):
        found = json.loads((tmp_path / "back" / name).read_text())
        assert (found["bos_token_id"], found["eos_token_id"]) == (None, 3)


VOCAB = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": json.dumps({"model": {"vocab": VOCAB, "merges": ["a b"]}})},
        {"tokenizer.json": json.dumps({"model": {"vocab": [[token, -1.0] for token in VOCAB]}})},
        {"vocab.json": json.dumps(VOCAB), "merges.txt": "#version: 0.2\na b\n"},
    ],
    ids=["BPE", "Unigram", "without a tokenizer.json"],
)
def test_the_end_of_text_need_not_be_an_added_token(tmp_path: Path, files: dict[str, str]) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert special_tokens(tmp_path) == {"bos_token_id": None, "eos_token_id": 3}


def test_what_is_of_exports_alone(tmp_path: Path) -> None:
    source = hf_folder("gpt2", tmp_path / "hf")
    for dtype, size, tokenizer, said in (
        ("bf16", "5GB", None, "--dtype is bf16"),
        ("fp32", "5GB", source, "--tokenizer is "),
        ("fp32", "1GB", None, "--max-shard-size is 1GB"),
    ):
        with pytest.raises(BadInputError, match=f"{said}.* Hugging Face folder, .* leave it out"):
            convert(source, tmp_path / "run", dtype, size, tokenizer)
    assert not (tmp_path / "run").exists()


def test_the_folder_one_is_in_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hf_folder("gpt2", tmp_path / "hf")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(BadInputError, match=r"^\. exists already"):
        convert(source, Path(), "fp32", "5GB", None)
    assert not list((tmp_path / "here").iterdir())


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    source = hf_folder("gpt2", tmp_path / "hf")
    convert(source, tmp_path / "run", "fp32", "5GB", None)
    for arguments, expected in (
        (("fp8", "5GB"), "--dtype is 'fp8'"),
        (("fp32", "5 apples"), "--max-shard-size is '5 apples'; expected a size above zero, such as 5GB"),
        (("fp32", "0GB"), "--max-shard-size is '0GB'"),
    ):
        with pytest.raises(BadInputError, match=expected):
            convert(tmp_path / "run", tmp_path / "new", *arguments, None)
    with pytest.raises(BadInputError, match="exists already"):
        convert(tmp_path / "run", source, "fp32", "5GB", None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInputError, match="neither a checkpoint nor"):
        convert(tmp_path / "empty", tmp_path / "new", "fp32", "5GB", None)
    part = tmp_path / "run" / "checkpoints" / "step-00000000" / "rank-00000.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 128
    part.write_bytes(content)
    with pytest.raises(RunFailedError, match=r"rank-00000\.safetensors does not match its checksum"):
        convert(tmp_path / "run", tmp_path / "new", "fp32", "5GB", None)
    assert not list(tmp_path.glob("new*"))


def test_values_too_large_for_fp16(tmp_path: Path) -> None:
    source = hf_folder("llama", tmp_path / "hf")
    save_file({**weights(source), NORM: torch.full((32,), 1e5)}, _file(tmp_path))
    convert(source, tmp_path / "run", "fp32", "5GB", None)
    with pytest.raises(BadInputError, match=r"fp16, which cannot hold the values of model\.norm\.weight"):
        convert(tmp_path / "run", tmp_path / "new", "fp16", "5GB", None)


def test_progress_comes_to_its_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[int]] = {}

    @contextmanager
    def recorded(title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        seen[title] = [total]
        yield seen[title].append

    for module in ("verify", "convert.export", "convert.import_hf"):
        monkeypatch.setattr(f"llmtrain.checkpoint.{module}.progress", recorded)
    source = hf_folder("llama", tmp_path / "hf")
    convert(source, tmp_path / "run", "fp32", "5GB", None)
    assert verify(tmp_path / "run" / "checkpoints" / "step-00000000").problems == []
    convert(tmp_path / "run", tmp_path / "back", "bf16", "9KB", None)
    assert list(seen) == ["import", "verify step-00000000", "export"]
    for total, *done in seen.values():
        assert len(done) > 3
        assert sum(done) == total
