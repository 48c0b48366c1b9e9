"""Hugging Face folders as users have them: SentencePiece models alone, other names of keys, files in Git LFS."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
from llmtrain.checkpoint.convert import target
from llmtrain.checkpoint.convert.convert import convert
from llmtrain.checkpoint.convert.generation import end_tokens
from llmtrain.checkpoint.convert.hf_weights import hf_tensors
from llmtrain.checkpoint.convert.tokenizer import copy_tokenizer, tokenizer_files
from llmtrain.errors import BadInputError
from llmtrain.inference.trained import open_model
from llmtrain.model.hf_config import read_hf_config
from llmtrain.training.run_folder import write_record
from llmtrain_data.errors import DataError
from llmtrain_data.tokenizer import begin_of_text_id, end_of_text_id, load_tokenizer, tokenizer_size
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
TINY = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=4)


def test_a_sentencepiece_model_is_a_tokenizer(tmp_path: Path) -> None:
    """As in the folders of Llama 2, which have no tokenizer.json."""
    texts = iter(["hello world, what a world"] * 20)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts,
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=290,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.vocab").unlink()
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("what a hello", add_special_tokens=False).ids
    assert tokenizer.decode(ids) == "what a hello"
    assert (begin_of_text_id(tmp_path, tokenizer), end_of_text_id(tmp_path, tokenizer)) == (1, 2)
    copy_tokenizer(tmp_path, tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").encode("what a hello", add_special_tokens=False).ids == ids
    assert tokenizer_size(tmp_path / "copy") == tokenizer_size(tmp_path) == max(tokenizer.get_vocab().values()) + 1


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.model", b"none"), ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n")],
)
def test_a_tokenizer_that_cannot_be_read_is_told(name: str, content: bytes, tmp_path: Path) -> None:
    GPT2LMHeadModel(TINY).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / name).write_bytes(content)
    sentence = "; its tokenizer cannot be read, so `llmtrain generate` needs another one: "
    found = convert(tmp_path / "hf", tmp_path / "run", "fp32", "5GB", None).sentence
    assert f"checkpoint.resume={tmp_path / 'run'}{sentence}" in found


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    """Its folder has a generation_config.json, which travels, and is no tokenizer."""
    GPT2LMHeadModel(TINY).save_pretrained(tmp_path / "hf")
    settings = '{"eos_token_id": 7}'
    (tmp_path / "hf/generation_config.json").write_text(settings)
    sentence = convert(tmp_path / "hf", tmp_path / "run", "fp32", "5GB", None).sentence
    assert sentence.endswith(f"checkpoint.resume={tmp_path / 'run'}")
    assert open_model(tmp_path / "run", print).tokenizer is None
    convert(tmp_path / "run", tmp_path / "back", "fp32", "5GB", None)
    assert (tmp_path / "back/generation_config.json").read_text() == settings
    with pytest.raises(BadInputError, match="which holds no tokenizer"):
        convert(tmp_path / "run", tmp_path / "other", "fp32", "5GB", tmp_path / "hf")


def test_other_names_of_gpt2s_keys(tmp_path: Path) -> None:
    others = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 5, "max_position_embeddings": 7}
    config = {"model_type": "gpt2", "vocab_size": 11, **others}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours, theirs = read_hf_config(tmp_path), GPT2Config.from_pretrained(tmp_path)
    assert (ours.hidden, ours.heads, ours.layers, ours.positions) == (24, 3, 5, 7)
    assert (theirs.n_embd, theirs.n_head, theirs.n_layer, theirs.n_positions) == (24, 3, 5, 7)
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_head": 4}))
    with pytest.raises(
        BadInputError, match=r"num_attention_heads in .* is 3; our model computes only with the 4 of n_"
    ):
        read_hf_config(tmp_path)


def test_a_base_of_rope_for_a_million_positions(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 11, "rope_theta": 3580165449.0, **sizes})
    )
    assert read_hf_config(tmp_path).rope_theta == 3580165449.0


def test_files_that_git_lfs_holds(tmp_path: Path) -> None:
    GPT2LMHeadModel(TINY).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_text(POINTER)
    with pytest.raises(
        BadInputError, match=r"model.safetensors holds no weights: Git LFS has not fetched it; run git "
    ):
        list(hf_tensors(tmp_path, read_hf_config(tmp_path)))
    (tmp_path / "tokenizer.json").write_text(POINTER)
    with pytest.raises(DataError, match=r"tokenizer.json .* Git LFS has not fetched it; run git lfs pull"):
        load_tokenizer(tmp_path)


def test_a_volume_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's output folder may be where a volume is mounted; the result could not be renamed to it."""
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "export")
    (tmp_path / "export").mkdir()
    with pytest.raises(
        BadInputError, match=r"export is where a volume is mounted; give a folder in it, such as .*/model"
    ):
        target.refuse_existing(tmp_path / "export")
    target.refuse_existing(tmp_path / "export/model")


def test_a_head_that_is_not_tied_whatever_its_config_says(tmp_path: Path) -> None:
    """transformers takes the stored head then. One that is the embedding is usual."""
    GPT2LMHeadModel(TINY).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert len(list(hf_tensors(tmp_path, read_hf_config(tmp_path)))) > 10
    weights["lm_head.weight"][-1] += 1
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        BadInputError, match=r"^lm_head\.weight in .* is not transformer\.wte\.weight, but config\.json"
    ):
        list(hf_tensors(tmp_path, read_hf_config(tmp_path)))


@pytest.mark.parametrize(("key", "value"), [("is_causal", False), ("transformers_weights", "other.safetensors")])
def test_what_our_models_do_not_do(key: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY.to_dict(), key: value}))
    with pytest.raises(BadInputError, match=f"^{key} in "):
        read_hf_config(tmp_path)


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "theta", "scaled"),
    [
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 10.0, "rope_type": "default"}}, 100.0, 16),
        ({"rope_scaling": {"rope_type": "default"}, "rope_parameters": {**LLAMA3, "rope_theta": 10.0}}, 100.0, None),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 10.0}, "original_max_position_embeddings": 4}, 10.0, 4),
        ({"rope_scaling": {}, "rope_parameters": {"rope_theta": 10.0, "rope_type": "default"}}, 10.0, None),
    ],
)
def test_rope_as_transformers_reads_it(
    keys: dict[str, object], theta: float, scaled: int | None, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64}
    config = {"model_type": "llama", "vocab_size": 11, "max_position_embeddings": 32, "rope_theta": 100.0, **sizes}
    (tmp_path / "config.json").write_text(json.dumps({**config, **keys}))
    read: Any = LlamaConfig.from_pretrained(tmp_path)
    # As the frequencies are computed.
    read.standardize_rope_params()
    ours, theirs = read_hf_config(tmp_path), read.rope_parameters
    assert ours.rope_theta == theirs["rope_theta"] == theta
    original = None if ours.rope_scaling is None else ours.rope_scaling.original_positions
    assert original == scaled
    if theirs["rope_type"] == "llama3":
        assert theirs["original_max_position_embeddings"] == scaled


@pytest.mark.parametrize(
    "settings", [None, {"model_max_length": 1024}, {"tokenizer_class": None}], ids=["no settings", "no class", "null"]
)
def test_an_exported_tokenizer_without_a_class_makes_its_own_ids(
    settings: dict[str, object] | None, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFKC()
    split = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(split, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = ["don't stop   now\n\n def f(x):\n    return x" * 3] * 9
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    )
    GPT2LMHeadModel(GPT2Config(**{**TINY.to_dict(), "vocab_size": 300})).save_pretrained(tmp_path / "hf")
    tokenizer.save(str(tmp_path / "hf/tokenizer.json"))
    if settings is not None:
        (tmp_path / "hf/tokenizer_config.json").write_text(json.dumps(settings))
    convert(tmp_path / "hf", tmp_path / "run", "fp32", "5GB", None)
    convert(tmp_path / "run", tmp_path / "back", "fp32", "5GB", None)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert theirs(texts[0])["input_ids"] == tokenizer.encode(texts[0]).ids
    assert (len(theirs), theirs.eos_token) == (tokenizer.get_vocab_size(), "<|endoftext|>")


def test_all_tokens_that_end_a_text_travel(tmp_path: Path) -> None:
    GPT2LMHeadModel(TINY).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf/generation_config.json").unlink()
    ids = {"eos_token_id": [5, 6], "pad_token_id": 7}
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps({**config, **ids}))
    convert(tmp_path / "hf", tmp_path / "run", "fp32", "5GB", None)
    assert end_tokens(tmp_path / "run/tokenizer") == {5, 6}
    convert(tmp_path / "run", tmp_path / "back", "fp32", "5GB", None)
    found = json.loads((tmp_path / "back/generation_config.json").read_text())
    assert {key: found[key] for key in ids} == ids


@pytest.mark.parametrize(
    ("content", "ends"), [('{"eos_token_id": 7}', {7}), ('{"eos_token_id": "x"}', set()), ("[]", set()), ("{", set())]
)
def test_which_tokens_end_a_text(content: str, ends: set[int], tmp_path: Path) -> None:
    assert end_tokens(tmp_path) == set()
    (tmp_path / "generation_config.json").write_text(content)
    assert end_tokens(tmp_path) == ends


def test_a_vocabulary_without_a_tokenizer_json_travels(tmp_path: Path) -> None:
    """BERT's and T5's own folders hold nothing else."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    (tmp_path / "own/vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n")
    copy_tokenizer(tmp_path / "own", tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").encode("a b", add_special_tokens=False).ids == [5, 6]
    for name in ("spiece.model", "sentencepiece.bpe.model"):
        (tmp_path / "own" / name).touch()
        assert tmp_path / "own" / name in tokenizer_files(tmp_path / "own")


@pytest.mark.parametrize(("given", "ends"), [(None, {5}), ("hf", {5}), ("other", {6})])
def test_a_run_keeps_the_end_tokens_of_the_tokenizer_that_it_has(
    given: str | None, ends: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, number in (("hf", 5), ("other", 6)):
        Path(name).mkdir()
        Path(name, "tokenizer.json").write_text("{}")
        Path(name, "generation_config.json").write_text(json.dumps({"eos_token_id": number}))
    Path("run").mkdir()
    plan: Any = SimpleNamespace(record={}, data=SimpleNamespace(tokenizer=given), import_from="hf")
    write_record(Path("run"), plan)
    assert end_tokens(Path("run/tokenizer")) == ends
