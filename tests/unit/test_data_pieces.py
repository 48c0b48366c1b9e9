"""Long documents are encoded piece by piece, to the ids that they have as a whole."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmtrain_data import encode
from llmtrain_data.blend import plan_blend
from llmtrain_data.corpus import open_corpus
from llmtrain_data.corpus_options import CorpusOptions
from llmtrain_data.errors import DataError
from llmtrain_data.indexed import IndexedData, IndexedWriter
from llmtrain_data.prepare import PrepareOptions, prepare
from llmtrain_data.readers import TextChunk
from llmtrain_data.sample_order import Interleave
from llmtrain_data.tokenizer import check_new_tokenizer, load_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = "".join(f"Word {number} of the text, and\n\n  more of it:\tfoo_{number % 7}\n" for number in range(900))
END = 1


def spaced(kind: str) -> Tokenizer:
    """A tokenizer that puts a space before each text."""
    tokenizer = Tokenizer(models.BPE())
    alphabet = list(set(TEXT) | {"\u2581", "\u0120"})
    if kind == "llama 2":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        tokenizer.decoder = decoders.Replace("\u2581", " ")
    elif kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        tokenizer.decoder = decoders.Metaspace()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<unk>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    # Otherwise whole lines of Llama 2's would be words.
    tokenizer.train_from_iterator(TEXT.split(), trainer)
    return tokenizer


@pytest.mark.parametrize("encoder", ["auto", "tokenizers"])
@pytest.mark.parametrize("kind", ["llama 2", "metaspace", "byte-level"])
def test_no_space_comes_before_a_piece(
    kind: str, encoder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmtrain_data.readers.CHUNK", 9000)
    (tmp_path / "own").mkdir()
    spaced(kind).save(str(tmp_path / "own/tokenizer.json"))
    settings = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "own/tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "in.txt").write_text(TEXT)
    tokenizer = load_tokenizer(tmp_path / "own")
    assert encode.line_without_space(tokenizer) is not None
    corpus = open_corpus(str(tmp_path / "in.txt"), CorpusOptions())
    prepare(corpus, tmp_path / "own", tmp_path / "set", PrepareOptions(encoder=encoder, workers=1))
    data = IndexedData(tmp_path / "set")
    assert data.documents > 5
    ids = [int(token) for number in range(data.documents) for token in data.document(number)]
    assert ids == [*tokenizer.encode(TEXT, add_special_tokens=False).ids, END]


def test_an_end_whose_piece_has_no_token() -> None:
    """The last token of a document is before its end, and each document has its own."""
    chunk = TextChunk([b"aa", b" ", b"b", b" ", b"c"], np.array([False, True, True, True, False]), 9, False)
    ids, lengths = np.array([3, 3, 4, 5], np.uint32), np.array([2, 0, 1, 0, 1])
    found = encode.assemble(chunk, chunk.texts(), ids, lengths, encode.DocumentFormat(None, END, np.dtype("uint16")))
    assert found.ids.tolist() == [3, 3, END, 4, END, 5]
    assert found.lengths.tolist() == [3, 2, 1]


def test_a_new_tokenizer_replaces_a_tokenizer_alone(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "own" / name).write_text("{}")
    check_new_tokenizer(300, tmp_path / "own", overwrite=True)
    (tmp_path / "own/model.safetensors").touch()
    with pytest.raises(DataError, match=r"holds more than a tokenizer, such as model\.safetensors, which --overwrite"):
        check_new_tokenizer(300, tmp_path / "own", overwrite=True)


def test_a_column_of_texts_may_hold_numbers(tmp_path: Path) -> None:
    """pandas reads some 10,000 rows at a time, and would take some of them for numbers."""
    rows = [*["hello"] * 9999, "007", *["008"] * 50, "1e5", "True", "NA"]
    (tmp_path / "a.csv").write_text("".join(f"{row}\n" for row in ["text", *rows]))
    chunks = open_corpus(str(tmp_path / "a.csv"), CorpusOptions()).chunks()
    assert [text for chunk in chunks for text in chunk.texts()] == rows


def test_a_blend_is_planned_as_it_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        writer = IndexedWriter(Path(name), np.dtype(np.uint16))
        writer.add(np.arange(40_000) % 99, np.full(400, 100))
        writer.commit()
    plan = plan_blend(["0.999999", "a", "0.000001", "b"], "1B", 64, "98,1,1")
    period = 1 << 16
    counts = Interleave([0.999999, 0.000001]).counts(period)
    assert [part.share for part in plan.parts] == [count / period for count in counts]
