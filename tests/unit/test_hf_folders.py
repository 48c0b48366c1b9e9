"""Hugging Face folders as users have them: SentencePiece models alone, other names of keys, files in Git LFS."""

import json
from pathlib import Path

import pytest
import sentencepiece
from llmtrain.checkpoint.convert import target
from llmtrain.checkpoint.convert.convert import convert
from llmtrain.checkpoint.convert.hf_weights import hf_tensors
from llmtrain.checkpoint.convert.tokenizer import copy_tokenizer
from llmtrain.errors import BadInputError
from llmtrain.inference.trained import open_model
from llmtrain.model.hf_config import read_hf_config
from llmtrain_data.errors import DataError
from llmtrain_data.tokenizer import begin_of_text_id, end_of_text_id, load_tokenizer, tokenizer_size
from transformers import GPT2Config, GPT2LMHeadModel

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
