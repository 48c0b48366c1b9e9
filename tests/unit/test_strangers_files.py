"""Untrusted files that would hang a reader, or hold more than it expects, are refused in a sentence."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmtrain.checkpoint.convert.hf_weights import hf_tensors
from llmtrain.checkpoint.convert.tokenizer import special_tokens
from llmtrain.checkpoint.manifest import read_manifest
from llmtrain.checkpoint.plain_file import DamagedError
from llmtrain.cluster.load import load_cluster
from llmtrain.errors import BadInputError
from llmtrain.launch.submit import load_site
from llmtrain.model.hf_config import read_hf_config
from llmtrain.model.presets import PRESETS
from llmtrain.recipe.load import load_recipe
from llmtrain_data import readers, streams
from llmtrain_data.corpus import open_corpus
from llmtrain_data.corpus_options import CorpusOptions
from llmtrain_data.errors import DataError
from llmtrain_data.indexed import IndexedData
from llmtrain_data.left_out import LeftOut
from llmtrain_data.tokenizer import (
    end_of_text_id,
    hf_tokenizer,
    load_tokenizer,
    sampled_texts,
    tokenizer_size,
    train_tokenizer,
)
from llmtrain_data.untrusted import UnreadableError, read_bytes, read_json

REFUSED = (BadInputError, DataError, DamagedError)
Read = Callable[[Path], object]


def corpus(path: Path, **options: Any) -> list[str]:
    """Return all texts of an input."""
    return [text for chunk in open_corpus(str(path), CorpusOptions(**options)).chunks() for text in chunk.texts()]


def weights(path: Path) -> list[object]:
    """Read a Hugging Face model's weights."""
    return list(hf_tensors(path.parent, PRESETS["gpt2-124m"]))


def prepared(path: Path) -> IndexedData:
    """Open a prepared set."""
    (path.parent / "set.idx").touch()
    return IndexedData(path.parent / "set")


def beside_a_tokenizer(path: Path) -> None:
    train_tokenizer(iter([["some words"]]), 258, path.parent / "trained")
    (path.parent / "trained" / "tokenizer.json").rename(path.parent / "tokenizer.json")
    tokenizer_size(path.parent)


# Every reader of a file that is named, or found in a named folder.
READERS: dict[str, tuple[str, Read]] = {
    "recipe": ("a.yaml", lambda path: load_recipe(str(path))),
    "cluster": ("a.yaml", load_cluster),
    "site": ("a.yaml", load_site),
    "text": ("a.txt", corpus),
    "separated text": ("a.txt", lambda path: corpus(path, separator="x")),
    "JSONL": ("a.jsonl", corpus),
    "compressed JSONL": ("a.jsonl.gz", corpus),
    "Parquet": ("a.parquet", corpus),
    "CSV": ("a.csv", corpus),
    "HF config": ("config.json", lambda path: read_hf_config(path.parent)),
    "HF weights": ("model.safetensors", weights),
    "HF index": ("model.safetensors.index.json", weights),
    "tokenizer's size": ("tokenizer.json", lambda path: tokenizer_size(path.parent)),
    "tokenizer": ("tokenizer.json", lambda path: load_tokenizer(path.parent)),
    "SentencePiece": ("tokenizer.model", lambda path: hf_tokenizer(path.parent)),
    "tokenizer's settings": ("tokenizer_config.json", lambda path: hf_tokenizer(path.parent)),
    "settings beside a tokenizer": ("tokenizer_config.json", beside_a_tokenizer),
    "end of text": ("special_tokens_map.json", lambda path: end_of_text_id(path.parent, load_tokenizer(path.parent))),
    "exported tokenizer": ("tokenizer.json", lambda path: special_tokens(path.parent)),
    "manifest": ("manifest.json", lambda path: read_manifest(path.parent)),
    "prepared set": ("set.bin", prepared),
}
JSON = {name: reader for name, reader in READERS.items() if reader[0].endswith((".json", ".jsonl", ".yaml"))}


@pytest.mark.parametrize("name", READERS)
def test_a_named_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    file, read = READERS[name]
    os.mkfifo(tmp_path / file)
    with pytest.raises(REFUSED):
        read(tmp_path / file)


@pytest.mark.parametrize("content", ["[" * 200_000, '{"a":' * 200_000, "[" * 200_000 + "]" * 200_000])
@pytest.mark.parametrize("name", JSON)
def test_a_deeply_nested_file(name: str, content: str, tmp_path: Path) -> None:
    file, read = JSON[name]
    (tmp_path / file).write_text(content)
    with pytest.raises(REFUSED) as refused:
        read(tmp_path / file)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("name", READERS)
def test_a_file_of_no_meaning_is_not_quoted(name: str, tmp_path: Path) -> None:
    file, read = READERS[name]
    (tmp_path / file).write_text("root:x:0:0:root:/root:/bin/bash\n" * 1000 if "text" not in name else "\0")
    with pytest.raises(REFUSED) as refused:
        read(tmp_path / file)
    assert str(refused.value).count("/bin/bash") <= 1
    assert len(str(refused.value)) < 1000


def test_nesting_in_a_field_that_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text":"a"}\n{"text":"a","b":' + "[" * 200_000 + "]" * 200_000 + "}\n")
    with pytest.raises(DataError, match=r"a\.jsonl line 2 is not JSON"):
        corpus(tmp_path / "a.jsonl")


def test_no_more_is_read_of_a_file_than_its_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"[1, 2]")
    assert read_bytes(tmp_path / "a", 6) == b"[1, 2]"
    assert read_json(tmp_path / "a", 6) == [1, 2]
    # The system does not report this file's length, so only the reader's limit ends it.
    for path in (tmp_path / "a", Path("/proc/self/maps")):
        with pytest.raises(UnreadableError, match="expected at most 5"):
            read_bytes(path, 5)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_document_without_end(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes when the document exceeds the limit, not when all of it is in memory."""
    monkeypatch.setattr(streams, "LONGEST", 3 << 20)
    records = b'{"text":"a"}\n\n{"text":"' + b"x" * (8 << 20) + b'"}\n'
    pack = gzip.compress if suffix else bytes
    (tmp_path / f"a.jsonl{suffix}").write_bytes(pack(records))
    (tmp_path / f"a.txt{suffix}").write_bytes(pack(b"one\n|two\n" + b"x" * (8 << 20)))
    with pytest.raises(DataError, match=rf"a\.jsonl{suffix} line 3 has more than 3 MiB"):
        corpus(tmp_path / f"a.jsonl{suffix}")
    with pytest.raises(DataError, match=rf"a\.txt{suffix}: the document at line 2, up to b'\|', has more than 3 MiB"):
        corpus(tmp_path / f"a.txt{suffix}", separator="|")
    # Text without a separator is split anyway, so its lines may have any length.
    assert "".join(corpus(tmp_path / f"a.txt{suffix}")) == "one\n|two\n" + "x" * (8 << 20)


@pytest.mark.parametrize("content", ["one||two|", "|one||two", "a||b||", "||", "abc"])
@pytest.mark.parametrize("separator", ["|", "||"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_documents_between_separators(
    content: str, separator: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes a separator that spans two reads."""
    monkeypatch.setattr(streams, "CHUNK", chunk)
    (tmp_path / "a.txt").write_text(content)
    assert corpus(tmp_path / "a.txt", separator=separator) == content.split(separator)


def test_long_lines_are_cut_between_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for chunk in range(1, 9):
        monkeypatch.setattr(streams, "CHUNK", chunk)
        monkeypatch.setattr("llmtrain_data.readers.CHUNK", chunk)
        text = "\N{EURO SIGN}\N{GRINNING FACE}a" * 5000
        (tmp_path / "a.txt").write_text(text, encoding="utf-8")
        assert "".join(corpus(tmp_path / "a.txt")) == text


@pytest.mark.parametrize("whole", [True, False])
def test_bytes_that_continue_no_character(whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run of such bytes is split into chunks of the usual size, in blocks that end soon after CHUNK bytes."""
    monkeypatch.setattr(streams, "CHUNK", 100)
    monkeypatch.setattr(readers, "CHUNK", 100)
    monkeypatch.setattr(readers, "WHOLE_FILE", 200)
    content = b"text\n" * 5000 + b"\x80" * 20_000
    (tmp_path / "a.txt").write_bytes(content)
    pieces = list(readers.read_text(tmp_path / "a.txt", None, whole, LeftOut()))
    assert b"".join(piece.content for piece in pieces) == content
    sizes = [len(piece.content) for piece in pieces]
    # The part of a block beyond the size of a chunk is a short chunk of its own.
    assert max(sizes) <= (200 if whole else 4096)
    assert len(sizes) < 3 * len(content) / max(sizes)
    assert max(len(block) for block, _, _ in streams.blocks(tmp_path / "a.txt", 100, whole_lines=False)) <= 203


def test_empty_documents_are_no_endless_chunk(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\n" * 100_000)
    chunks = list(open_corpus(str(tmp_path / "a.txt"), CorpusOptions(separator="\n")).chunks())
    assert sum(len(chunk.texts()) for chunk in chunks) == 100_001
    assert max(len(chunk.texts()) for chunk in chunks) < 20_000


@pytest.mark.parametrize("separator", [None, "\n"])
@pytest.mark.parametrize(
    "content", [b"\x7fELF\0\0\0", bytes(range(256)) * 10, "Gr\xfc\xdfe an alle".encode("utf-16"), b"\x80\xfe\xff" * 99]
)
def test_what_is_no_text_is_refused(content: bytes, separator: str | None, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    found = open_corpus(str(tmp_path / "a"), CorpusOptions(separator=separator))
    for read in (lambda: list(found.chunks()), lambda: list(sampled_texts(found, 10**6))):
        with pytest.raises(DataError, match="is not text"):
            read()
    # In a folder such a file is skipped, and a folder with only such files has no text.
    with pytest.raises(DataError, match="no text"):
        list(sampled_texts(open_corpus(str(tmp_path), CorpusOptions(separator=separator)), 10**6))


def test_slips_in_a_text_are_taken(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Grüße ".encode() * 20 + b"caf\xe9 " + "Grü".encode()[:-1])
    assert "".join(corpus(tmp_path / "a.txt")).endswith("caf\ufffd Gr\ufffd")


def test_a_header_of_weights_that_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = json.dumps({"__metadata__": {"a": "x" * (17 << 20)}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(BadInputError, match="has a header of 17825819 bytes; expected at most"):
        weights(path)


HF_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
HF_NUMBERS = ("rms_norm_eps", "rope_theta", "attention_dropout")


@pytest.mark.parametrize("key", [*HF_SIZES, "intermediate_size", "max_position_embeddings", *HF_NUMBERS])
@pytest.mark.parametrize(
    "value", ["1e13", "10000000000000", "9" * 400, "-1", "NaN", "Infinity", "1e999", "true", '"x"', "[]"]
)
def test_a_number_of_a_hugging_face_model_that_none_has(key: str, value: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = dict.fromkeys((*HF_SIZES, "intermediate_size", "max_position_embeddings"), 8)
    sizes |= {"model_type": "llama", "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert read_hf_config(tmp_path).layers == 8
    (tmp_path / "config.json").write_text(json.dumps(sizes | {key: "VALUE"}).replace('"VALUE"', value))
    with pytest.raises(BadInputError, match=f"{key} in .*config.json is .*; our model computes only with a"):
        read_hf_config(tmp_path)
