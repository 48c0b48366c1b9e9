"""Corpora of every kind give their documents, and errors name the place."""

import errno
import gzip
import json
import os
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from llmtrain_data import hf, readers
from llmtrain_data.corpus import FileCorpus, open_corpus
from llmtrain_data.corpus_options import CorpusOptions
from llmtrain_data.errors import DataError

TEXTS = ["one two", "dr\u00fcei \U0001f600\nfour", 'quote " and \\ back', "last"]


def documents(source: Path | str, **options: object) -> list[str]:
    """Read a corpus; joins the parts of each document."""
    out: list[str] = []
    unfinished = False
    for chunk in open_corpus(str(source), CorpusOptions(**options)).chunks():  # type: ignore[arg-type]
        texts = chunk.texts()
        ends = [True] * len(texts) if chunk.ends is None else chunk.ends.tolist()
        for text, end in zip(texts, ends, strict=True):
            if unfinished:
                out[-1] += text
            else:
                out.append(text)
            unfinished = not end
    return out


def jsonl(texts: Sequence[str | None], key: str = "text") -> bytes:
    return b"".join(json.dumps({"id": [1], key: text, "z": {"text": "no"}}).encode() + b"\n" for text in texts)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("chunk", [16, 1 << 20])
def test_jsonl(tmp_path: Path, suffix: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "CHUNK", chunk)
    packs: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packs[suffix](jsonl(TEXTS).rstrip(b"\n")))
    assert documents(path) == TEXTS
    corpus = open_corpus(str(path), CorpusOptions())
    assert sum(piece.done for piece in corpus.chunks()) == corpus.total == path.stat().st_size


def test_jsonl_takes_blank_lines_missing_text_and_lone_surrogates(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"body":"a"}\n\n{"x":1}\n{"body":null}\n{"body":"\\ud800!"}\n')
    assert documents(tmp_path / "a.json", text_key="body") == ["a", "", "", "?!"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"text":"a"}\n{"text":\n',
            r"a\.jsonl line 2 is not JSON \(Expecting value, at column 9\); expected one object per line",
        ),
        ('{"text":"a"}\n\n{"text":5}\n', r"a\.jsonl line 3 has int '5'"),
        ('["text"]\n', r"a\.jsonl line 1 has list"),
        ('{"body":"a","x":1}\n', r"no text in field 'text', only body, x; choose a field with --text-key"),
    ],
)
def test_broken_jsonl_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        documents(tmp_path / "a.jsonl")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_broken_line_of_a_later_chunk_is_named(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error, the lines before the chunk are counted, blank lines included."""
    monkeypatch.setattr(readers, "CHUNK", 50)
    content = b'{"text":"a"}\n\n' * 20 + b'{"text":5}\n' + b'{"text":"b"}\n' * 20
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(DataError, match=rf"a\.jsonl{suffix} line 41 has int '5'"):
        documents(path)


def test_of_a_field_given_twice_the_last_counts(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text":"a","m":{"text":"no"},"text":"b"}\n{"text":"caf\xe9"}\n{"text":"\\u00e9"}\n'
    )
    assert documents(tmp_path / "a.jsonl") == ["b", "caf\ufffd", "\u00e9"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    ("name", "content", "separator"),
    [
        ("a.txt", b"one\ntwo\n", None),
        ("a.txt", b"one\ntwo\n", "\n\n"),
        ("a.jsonl", b'{"text": "one\\ntwo\\n"}\n', None),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_a_byte_order_mark_is_no_text(
    name: str, content: bytes, separator: str | None, alone: bool, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / (name if pack is bytes else f"{name}.gz")
    path.write_bytes(pack(BOM_UTF8 + content))
    assert documents(path if alone else tmp_path, separator=separator) == ["one\ntwo\n"]


def test_encoders_get_the_texts_as_valid_utf8() -> None:
    pieces = [b"plain", "dr\u00fcei".encode(), b"caf\xe9 \xf0\x9f", b""]
    chunk = readers.TextChunk(pieces, None, 0)
    assert [text.decode() for text in chunk.encodable()] == chunk.texts()
    assert chunk.texts()[2] == "caf\ufffd \ufffd"
    lines = readers.LinesChunk(jsonl(TEXTS), "text", Path("a.jsonl"), 0, 0)
    assert lines.encodable() == lines.texts() == TEXTS


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_cut_short_is_found(tmp_path: Path, suffix: str) -> None:
    packed = gzip.compress(jsonl(TEXTS)) if suffix == ".gz" else zstandard.compress(jsonl(TEXTS))
    (tmp_path / f"a.jsonl{suffix}").write_bytes(packed[:-6])
    with pytest.raises(DataError, match=rf"a\.jsonl{suffix} cannot be read"):
        documents(tmp_path / f"a.jsonl{suffix}")


def test_parquet(tmp_path: Path) -> None:
    table = pa.table({"text": pa.array([*TEXTS, None]), "n": [1, 2, 3, 4, 5]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert documents(tmp_path / "a.parquet") == [*TEXTS, ""]
    with pytest.raises(DataError, match="no column 'body', only text, n"):
        documents(tmp_path / "a.parquet", text_key="body")
    with pytest.raises(DataError, match="column 'n' holds int64; expected text"):
        documents(tmp_path / "a.parquet", text_key="n")
    pyarrow.parquet.write_table(pa.table({"talk": [[{"role": "user"}]]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"column 'talk' holds list<.*; expected text"):
        documents(tmp_path / "c.parquet", text_key="talk")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(
        DataError, match=r"b\.parquet cannot be read: [^.;]*; check that it is whole and what its name says"
    ):
        documents(tmp_path / "b.parquet")


TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()]


@pytest.mark.parametrize("kind", [*TYPES, pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_parquet_columns_that_hold_text(tmp_path: Path, kind: pa.DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*TEXTS, None, "", *TEXTS * 50]
    column = pa.array(texts).cast(kind) if kind in TYPES else pa.array(texts).dictionary_encode()
    pyarrow.parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet", row_group_size=70)
    for chunk in (1, 200, 1 << 20):
        monkeypatch.setattr(readers, "CHUNK", chunk)
        assert documents(tmp_path / "a.parquet") == [text or "" for text in texts]
        monkeypatch.setattr(readers, "LONGEST", 10)
        with pytest.raises(DataError, match="column 'text': a value has more than"):
            documents(tmp_path / "a.parquet")
        monkeypatch.setattr(readers, "LONGEST", 1 << 20)


@pytest.mark.parametrize("how", ["in the file", "as its type", "as beginnings"])
def test_a_value_that_a_small_parquet_file_repeats(how: str, tmp_path: Path) -> None:
    """The value is not repeated in memory as often as in the column, and a chunk is sent to a process without the
    rest."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 1000), pa.array(["x" * 20_000]))
    beginnings = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
    pyarrow.parquet.write_table(
        pa.table({"text": column if how == "as its type" else column.dictionary_decode()}),
        tmp_path / "a.parquet",
        **beginnings if how == "as beginnings" else {},
    )
    assert (tmp_path / "a.parquet").stat().st_size < 50_000
    rows, before = 0, pa.total_allocated_bytes()
    for chunk in open_corpus(str(tmp_path / "a.parquet"), CorpusOptions()).chunks():
        rows += len(texts := chunk.texts())
        assert sum(map(len, texts)) <= 1.2 * readers.CHUNK
        assert len(ForkingPickler.dumps(chunk)) < 1.2 * readers.CHUNK
        assert pa.total_allocated_bytes() - before < 8 * readers.CHUNK
    assert rows == 1000


def test_text_alone_is_cut_at_line_ends_without_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "CHUNK", 10000)
    text = "".join(f"line {i} \u00e4\n" * (1 + i % 3) for i in range(4000)) + "x" * 9000 + "\u20ac" * 5000
    (tmp_path / "a.txt").write_text(text)
    chunks = list(open_corpus(str(tmp_path / "a.txt"), CorpusOptions()).chunks())
    pieces = [piece for chunk in chunks for piece in chunk.texts()]
    assert documents(tmp_path / "a.txt") == [text]
    assert len(pieces) > 20
    assert max(len(piece.encode()) for piece in pieces) <= 4096
    assert all(piece.endswith("\n") for piece in pieces[:-8])


def test_names_in_capitals_and_other_names_of_json_lines(tmp_path: Path) -> None:
    for name in ("A.JSONL", "b.jsonlines", "C.JSONL.GZ"):
        (tmp_path / name).write_bytes(gzip.compress(jsonl([name])) if name.endswith("GZ") else jsonl([name]))
        assert documents(tmp_path / name) == [name]
    (tmp_path / "d.txt").write_text("d.txt")
    (tmp_path / "e.json").write_bytes(jsonl(["e.json"]))
    assert sorted(documents(tmp_path)) == ["A.JSONL", "C.JSONL.GZ", "b.jsonlines", "d.txt", "e.json"]
    said = open_corpus(str(tmp_path), CorpusOptions()).description
    assert said == "5 files in a fixed shuffled order (3 jsonl, 1 json, 1 text)"


@pytest.mark.parametrize("name", ["a.csv.gz", "in/a.tsv", "in/A.CSV.zst"])
def test_a_table_that_datasets_does_not_open_is_refused(tmp_path: Path, name: str) -> None:
    """It would become text, with its commas and other columns."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"id,text\n1,one\n" if path.suffix == ".tsv" else gzip.compress(b"id,text\n1,one\n"))
    source = path if path.parent == tmp_path else path.parent
    with pytest.raises(
        DataError, match=rf"{re.escape(str(source))} (is a compressed table|has only tables)\. llmtrain"
    ):
        documents(source)
    if path.suffix != ".zst":
        assert documents(source, input_format="text") == ["id,text\n1,one\n"]


def test_a_table_among_other_files_is_text(tmp_path: Path) -> None:
    """As in a folder of source code. The description says so."""
    (tmp_path / "a.py").write_text("pass")
    (tmp_path / "b.csv").write_text("id,text")
    assert sorted(documents(tmp_path)) == ["id,text", "pass"]
    description = open_corpus(str(tmp_path), CorpusOptions()).description
    assert description == "2 files in a fixed shuffled order (1 tables as text, 1 text)"


@pytest.mark.parametrize("chunk", [4, 1 << 20])
def test_text_with_a_separator(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "CHUNK", chunk)
    (tmp_path / "a.txt").write_text("one\ntwo<|end|>three<|end|>four")
    assert documents(tmp_path / "a.txt", separator="<|end|>") == ["one\ntwo", "three", "four"]
    (tmp_path / "a.png").write_bytes(b"\x89PNG\0<|end|>")
    assert documents(tmp_path, separator="<|end|>") == ["one\ntwo", "three", "four"]


def test_a_folder_gives_one_document_a_file_in_a_fixed_shuffled_order(tmp_path: Path) -> None:
    root = tmp_path / "in"
    for i in range(30):
        (root / f"d{i % 3}").mkdir(parents=True, exist_ok=True)
        (root / f"d{i % 3}" / f"{i:02}.py").write_text(f"{i}\n\n{i}")
    (root / "more.jsonl").write_bytes(jsonl(["from jsonl"]))
    (root / "image.png").write_bytes(b"\x89PNG\0\0\1")
    (root / "latin.txt").write_bytes(b"caf\xe9")
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("hidden")
    (root / "empty.py").write_text("")
    names = [f"{i}\n\n{i}" for i in range(30)]
    shuffled = documents(root, glob="*.py")
    assert shuffled != names
    assert sorted(shuffled) == sorted(names)
    os.rename(root, tmp_path / "elsewhere")
    assert documents(tmp_path / "elsewhere", glob="*.py") == shuffled
    ordered = documents(tmp_path / "elsewhere", shuffle=False)
    assert ordered == [*names[0::3], *names[1::3], *names[2::3], "caf\ufffd", "from jsonl"]


def test_folders_behind_links_are_read_once(tmp_path: Path) -> None:
    root, other = tmp_path / "in", tmp_path / "other"
    for folder in (root / "b" / "deep", other):
        folder.mkdir(parents=True)
    for path in (root / "one.txt", root / "b" / "deep" / "two.txt", other / "three.txt"):
        path.write_text(path.stem)
    without = documents(root)
    (root / "b" / "deep" / "round").symlink_to(root)
    (root / "a").symlink_to(root / "b")
    assert documents(root) == without
    (root / "b" / "out").symlink_to(other)
    (root / "d").symlink_to(other)
    assert sorted(documents(root)) == ["one", "three", "two"]
    assert documents(root, glob="out/*.txt") == ["three"]
    (tmp_path / "to_in").symlink_to(root)
    assert documents(tmp_path / "to_in") == documents(root)


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("shut", ".hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    scan, shut = os.scandir, {str(tmp_path / ".hidden")}

    def refusing(path: str | Path) -> object:
        if str(path) in shut:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert sorted(documents(tmp_path)) == ["a", "b"]
    shut.add(str(tmp_path / "shut"))
    with pytest.raises(DataError, match="shut cannot be read: Permission denied; allow it, or move it elsewhere"):
        documents(tmp_path)


def test_the_standard_library(tmp_path: Path) -> None:
    corpus, again = (open_corpus("stdlib", CorpusOptions()) for _ in range(2))
    assert isinstance(corpus, FileCorpus)
    assert isinstance(again, FileCorpus)
    assert corpus.total is not None
    assert 6e6 < corpus.total < 25e6
    assert corpus.files == again.files
    assert any(path.name == "argparse.py" for path in corpus.files)


def test_a_window_beyond_arrows_is_told(tmp_path: Path) -> None:
    """As in dumps that zstd --long=31 has compressed."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(compressor.compress(jsonl(TEXTS)) + compressor.flush())
    with pytest.raises(DataError, match=r"it was compressed with --long; decompress it with zstd -d --long=31$"):
        documents(tmp_path / "a.jsonl.zst")


def test_rows_of_datasets_are_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined, a thousand long ones would have more than the 2 GiB of an Arrow array of strings."""
    datasets = pytest.importorskip("datasets")
    table = pa.table({"text": pa.chunked_array([["a", "b"], ["c"]])})
    dataset = datasets.Dataset(table)
    monkeypatch.setattr(hf, "_open", lambda name, split, key: dataset)
    assert [len(chunk.column) for chunk in hf.read("set", "train", "text")] == [2, 1]


def test_what_datasets_opens(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "saved"))
    assert documents(tmp_path / "saved") == TEXTS
    splits = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "valid")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "splits"))
    assert documents(tmp_path / "splits", split="valid") == ["valid"]
    (tmp_path / "A.CSV").write_text('text,n\n"one, two",1\n')
    assert documents(tmp_path / "A.CSV") == ["one, two"]
    (tmp_path / "a.csv").write_text('text,n\n"one, two",1\nthree,2\n')
    for name, only in {"saved": "train", "splits": "train, valid", "a.csv": "train"}.items():
        with pytest.raises(DataError, match=rf"split test\) .* it has no such split, only {only}; choose"):
            documents(tmp_path / name, split="test")
    assert documents(tmp_path / "a.csv") == ["one, two", "three"]
    (tmp_path / "c.csv").write_text("text,n\nNA,1\nnull,2\n,3\n007,4\n")
    assert documents(tmp_path / "c.csv") == ["NA", "null", "", "007"]
    with pytest.raises(DataError, match=r"a\.csv has no column 'body', only text, n"):
        documents(tmp_path / "a.csv", text_key="body")
    (tmp_path / "b.csv").write_text('text,n\none,1\n"two,2,3,4\n')
    with pytest.raises(DataError, match=r"dataset .*b\.csv .*cannot be read: "):
        documents(tmp_path / "b.csv")
    with pytest.raises(DataError, match=r"dataset .*none.* cannot be opened"):
        documents(f"hf:{tmp_path}/none")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("none", {}, "none not found"),
        ("empty", {}, "no file in this folder matches"),
        ("zero.txt", {}, "is empty"),
        ("zero.txt", {"input_format": "xml"}, "--input-format is 'xml'"),
        ("zero.txt", {"separator": ""}, "--separator is empty"),
        ("", {"glob": "/abs"}, r"--glob is '/abs' \(.*\); expected a pattern of names"),
        ("", {"glob": "a**b"}, r"--glob (is )?'a\*\*b'"),
    ],
)
def test_inputs_that_cannot_be(tmp_path: Path, name: str, options: dict[str, object], message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "zero.txt").touch()
    with pytest.raises(DataError, match=message):
        documents(tmp_path / name, **options)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines_in_a_folder_are_known_by_their_first_line(tmp_path: Path, suffix: str) -> None:
    """Shards of C4 and Dolma are named .json.gz; a folder of programs has .json files that are one text."""
    packs: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}
    contents = {"a": jsonl(["one", "two"]), "b": b'{"name": 1}\n', "c": b'{\n "text": "x"\n}\n', "d": b"[" * 10**5}
    for name, content in contents.items():
        (tmp_path / f"{name}.json{suffix}").write_bytes(packs[suffix](content))
    texts = [content.decode() for name, content in contents.items() if name > "a"]
    assert documents(tmp_path, shuffle=False) == ["one", "two", *texts]
    assert documents(tmp_path, shuffle=False, glob="a*", text_key="body") == [contents["a"].decode()]
