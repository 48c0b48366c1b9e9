"""Every reader reads any file or refuses it in a sentence, within 5 s and 500 MB."""

import importlib
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from llmtrain_data.corpus import open_corpus
from llmtrain_data.corpus_options import CorpusOptions
from llmtrain_data.errors import DataError
from llmtrain_data.indexed import IndexedData, IndexedWriter
from llmtrain_data.readers import column_chunks

from tools.fuzz.cases import Case
from tools.fuzz.mutate import nested, places
from tools.fuzz.pool import case_of, run, summary
from tools.fuzz.targets import TARGETS, Target


@pytest.mark.parametrize("reader", TARGETS)
def test_inputs_of(reader: str, tmp_path: Path) -> None:
    case_of(TARGETS[reader], 2, 0)
    assert summary(list(run(TARGETS[reader], 2, range(100), tmp_path))) == []


# Seeds of inputs that once revealed errors.
PAST = {
    "data": (21, [4998, 16222]),
    "parquet": (21, [1017, 5867, 9838, 12088, 12535, 13214, 14021, 14429, 14594]),
    "hf-weights": (21, [19169]),
    "recipe": (11, [743]),
    "cluster": (11, [21, 86, 755, 757]),
    "tokenizer": (21, [3662, 4015, 15141, 15787]),
    "site": (11, [420, 508]),
}


@pytest.mark.parametrize("reader", PAST)
def test_past_finds_of(reader: str, tmp_path: Path) -> None:
    seed, indices = PAST[reader]
    assert summary([find for at in indices for find in run(TARGETS[reader], seed, range(at, at + 1), tmp_path)]) == []


def test_documents_that_go_beyond_the_end_and_back(tmp_path: Path) -> None:
    """Their differences overflow."""
    writer = IndexedWriter(tmp_path / "set", np.dtype(np.uint16))
    writer.add(np.arange(40), np.array([20, 20]))
    writer.commit()
    content = bytearray((tmp_path / "set.idx").read_bytes())
    content[-16:-8] = (2**62 + 2**61).to_bytes(8, "little")
    (tmp_path / "set.idx").write_bytes(content)
    with pytest.raises(DataError, match="is inconsistent"):
        IndexedData(tmp_path / "set", verified=False)


def test_columns_of_parquet_that_are_damaged(tmp_path: Path) -> None:
    """Text that is not UTF-8 is read as in other files; a dictionary without an entry is refused."""
    text = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff"))
    view = pa.array([b"a\xff"], pa.binary_view())
    for column in (text, text.view(pa.binary()), view, view.view(pa.string_view()), text.dictionary_encode()):
        assert [chunk.texts() for chunk in column_chunks(column, "x", 0)] == [["a\ufffd"]]
    lost = pa.DictionaryArray.from_arrays(pa.array([7], pa.int8()), pa.array(["a"]), safe=False)
    with pytest.raises(DataError, match="x cannot be read"):
        list(column_chunks(lost, "x", 0))


def test_a_column_of_parquet_whose_name_is_no_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"column": ["a"], "text": ["b"]}), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content.replace(b"column", b"c\xe5\xff\xffmn"))
    with pytest.raises(DataError, match=r"a\.parquet cannot be read"):
        list(open_corpus(str(tmp_path / "a.parquet"), CorpusOptions()).chunks())


@pytest.mark.soak
@pytest.mark.parametrize("reader", TARGETS)
def test_many_inputs_of(reader: str, tmp_path: Path) -> None:
    """FUZZ_COUNT: inputs for each reader. FUZZ_SEED: another seed gives other inputs."""
    count, seed = int(os.environ.get("FUZZ_COUNT", "1500")), int(os.environ.get("FUZZ_SEED", "1"))
    case_of(TARGETS[reader], seed, 0)
    assert summary(list(run(TARGETS[reader], seed, range(count), tmp_path))) == []


WHAT = {"1": "KeyError", "2": "ended the process with -9", "3": "MemoryError"}


def reads(case: Case) -> None:
    number = case.words[0]
    if number == "1":
        raise KeyError("x")
    if number == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    if number == "3":
        bytearray(10**9)
    if number == "4":
        raise OSError("refused")


def test_what_a_find_is(tmp_path: Path) -> None:
    """This shows that the fuzzer can report an error."""
    target = Target("test", lambda random: Case({"x": b""}, [str(random.randrange(5))]), reads)
    words = [case_of(target, 0, index).words[0] for index in range(20)]
    assert {*words} == {*"01234"}
    found = list(run(target, 0, range(20), tmp_path))
    expected = [(index, WHAT[word]) for index, word in enumerate(words) if word in WHAT]
    assert [(find.index, find.what.partition(":")[0]) for find in found] == expected
    assert len({path.parent.parent for path in tmp_path.rglob("find.txt")}) == 3


def test_an_error_of_the_fuzzer_is_told(tmp_path: Path) -> None:
    def breaks() -> None:
        raise RuntimeError("nothing to import")

    target = Target("test", lambda _: Case({"x": b""}, []), reads, imports=breaks)
    told, ended = run(target, 0, range(1), tmp_path)
    assert told.what == "fuzzer: nothing to import"
    assert "in breaks" in told.trace
    assert ended.what == "ended the process with 77"


def test_what_a_find_quotes_never_steers_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    program = importlib.import_module("tools.fuzz.__main__")

    def raises(_: Case) -> None:
        raise ValueError("\ud800\x1b[2J")

    monkeypatch.setattr(program, "TARGETS", {"test": Target("test", lambda _: Case({"x": b""}, []), raises)})
    monkeypatch.setattr(sys, "argv", ["fuzz", "--count", "1", "--finds", str(tmp_path)])
    assert program.main() == 1
    assert "ValueError: \\ud800\\x1b[2J" in capsys.readouterr().out


def test_places_of_a_deep_document() -> None:
    """A generator of inputs must not fail on an input of its own."""
    assert len(list(places(nested(5000, as_list=True)))) == 5000
    assert [key for _, key in places({"a": [1, {"b": 2}], "c": 3})] == ["a", 0, 1, "b", "c"]
