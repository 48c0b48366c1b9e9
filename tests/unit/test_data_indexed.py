"""The Megatron format, byte for byte, and the messages on damage."""

import os
import signal
import struct
from pathlib import Path

import numpy as np
import pytest
from llmtrain_data import indexed
from llmtrain_data.errors import DataError
from llmtrain_data.indexed import HEADER, MAGIC, TOKEN_DTYPES, IndexedData, IndexedWriter, token_dtype


def write(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> Path:
    writer = IndexedWriter(prefix, np.dtype(dtype))
    for tokens in documents:
        writer.add(np.array(tokens), np.array([len(tokens)]))
    writer.commit()
    return prefix


def golden_index(code: int, width: int, lengths: list[int], documents: list[int]) -> bytes:
    """Return an index as the format's description has it, packed field by field."""
    pointers = [width * sum(lengths[:i]) for i in range(len(lengths))]
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    return header + b"".join(
        struct.pack(f"<{len(values)}{kind}", *values)
        for kind, values in (("i", lengths), ("q", pointers), ("q", documents))
    )


@pytest.mark.parametrize(("dtype", "code", "kind"), [("uint16", 8, "H"), ("int32", 4, "i")])
def test_written_bytes(tmp_path: Path, dtype: str, code: int, kind: str) -> None:
    write(tmp_path / "a", [[1, 2, 3], [65000], [7, 0]], dtype)
    assert (tmp_path / "a.bin").read_bytes() == struct.pack(f"<6{kind}", 1, 2, 3, 65000, 7, 0)
    expected = golden_index(code, struct.calcsize(kind), [3, 1, 2], [0, 1, 2, 3])
    assert (tmp_path / "a.idx").read_bytes() == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.checksums", "a.idx"]


@pytest.mark.parametrize("code", TOKEN_DTYPES)
def test_reads_every_dtype_and_documents_of_several_sequences(tmp_path: Path, code: int) -> None:
    tokens = np.array([5, 6, 7, 8, 9], TOKEN_DTYPES[code])
    (tmp_path / "a.bin").write_bytes(tokens.tobytes())
    (tmp_path / "a.idx").write_bytes(golden_index(code, tokens.itemsize, [2, 1, 2], [0, 2, 3]))
    data = IndexedData(tmp_path / "a")
    assert data.dtype == tokens.dtype
    assert [data.document(i).tolist() for i in range(data.documents)] == [[5, 6, 7], [8, 9]]


def test_reads_back_what_it_wrote_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtrain_data.indexed.CHECKED_AT_ONCE", 3)
    documents = [list(range(i)) for i in (4, 1, 3, 2, 5, 1, 1)]
    data = IndexedData(write(tmp_path / "a", documents))
    assert [data.document(i).tolist() for i in range(data.documents)] == documents


def test_megatron_core_reads_and_writes_the_same(tmp_path: Path) -> None:
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset", exc_type=ImportError)
    torch = pytest.importorskip("torch")
    documents = [[1, 2, 3], [65000], list(range(500))]
    theirs = megatron.IndexedDataset(str(write(tmp_path / "ours", documents)))
    assert [theirs[i].tolist() for i in range(len(theirs))] == documents
    assert theirs.document_indices.tolist() == [0, 1, 2, 3]
    for vocab in (30000, 70000):
        dtype = megatron.DType.optimal_dtype(vocab)
        assert dtype == token_dtype(vocab)
        builder = megatron.IndexedDatasetBuilder(str(tmp_path / f"{vocab}.bin"), dtype=dtype)
        for tokens in documents:
            builder.add_document(torch.tensor(tokens), [len(tokens)])
        builder.finalize(str(tmp_path / f"{vocab}.idx"))
        data = IndexedData(tmp_path / str(vocab))
        assert [data.document(i).tolist() for i in range(data.documents)] == documents
    ours = [(tmp_path / f"ours{suffix}").read_bytes() for suffix in (".bin", ".idx")]
    assert ours == [(tmp_path / f"30000{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def test_a_cut_at_any_byte_is_found(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2, 3], [4]])
    for suffix in (".bin", ".idx"):
        path = tmp_path / f"a{suffix}"
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(DataError, match=r"a\.(bin|idx)"):
                IndexedData(tmp_path / "a")
        path.write_bytes(whole)
    IndexedData(tmp_path / "a")


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, b"X"),
        (9, b"\x02"),
        (17, b"\x09"),
        (HEADER.size, b"\x05"),
        (HEADER.size + 8, b"\x02"),
        (HEADER.size + 24, b"\x01"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(tmp_path: Path, at: int, value: bytes) -> None:
    write(tmp_path / "a", [[1, 2, 3], [4]])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[at : at + 1] = value
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(DataError, match=r"a\.idx"):
        IndexedData(tmp_path / "a")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.bin and .*a\.idx not found"):
        IndexedData(tmp_path / "a")


def test_one_writer_at_a_time_and_nothing_left_of_a_discarded_one(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "a", np.dtype("uint16"))
    with pytest.raises(DataError, match="another process"):
        IndexedWriter(tmp_path / "a", np.dtype("uint16"))
    writer.add(np.array([1]), np.array([1]))
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_where_the_disk_is_full(tmp_path: Path) -> None:
    """Closing a file writes its buffer, which fails on a full disk."""
    writer = IndexedWriter(tmp_path / "a", np.dtype("uint16"))
    writer._lengths.close()
    writer._lengths = open("/dev/full", "r+b")  # noqa: SIM115
    writer.add(np.array([1]), np.array([1]))
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_magic_and_limits() -> None:
    assert len(MAGIC) == 9
    assert HEADER.size == 34
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32


def test_a_disk_that_fails_while_writing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first fsync after a failed write reports it, and others may follow."""
    failures = [OSError(28, "No space left on device")]

    def fsync(descriptor: int) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(indexed, "FLUSHED_AT_ONCE", 1)
    monkeypatch.setattr(indexed.os, "fsync", fsync)
    writer = IndexedWriter(tmp_path / "a", np.dtype("uint16"))
    writer.add(np.array([1]), np.array([1]))
    writer._flusher.shutdown()
    with pytest.raises(OSError, match="No space left"):
        writer.commit()
    writer.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_signal_between_the_renames_waits_for_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    # A background job starts with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    writer = IndexedWriter(tmp_path / "set", np.dtype("uint16"))
    done: list[Path] = []
    writer.add(np.arange(4), np.array([4]))
    replace = os.replace

    def interrupted(source: Path, target: Path) -> None:
        replace(source, target)
        if len(done) == renames:
            os.kill(os.getpid(), signal.SIGINT)
        done.append(target)

    monkeypatch.setattr(os, "replace", interrupted)
    writer.commit()
    assert IndexedData(tmp_path / "set").token_count == 4
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_one_writer_at_a_time_until_all_names_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, refused = IndexedWriter(tmp_path / "set", np.dtype("uint16")), []
    first.add(np.arange(4), np.array([4]))
    replace = os.replace

    def renamed(source: Path, target: Path) -> None:
        replace(source, target)
        with pytest.raises(DataError, match="another process is writing") as error:
            IndexedWriter(tmp_path / "set", np.dtype("uint16"))
        refused.append(error)

    monkeypatch.setattr(os, "replace", renamed)
    first.commit()
    assert len(refused) == 3
    monkeypatch.setattr(os, "replace", replace)
    second = IndexedWriter(tmp_path / "set", np.dtype("uint16"))
    first.discard()
    second.add(np.arange(5), np.array([5]))
    second.commit()
    assert IndexedData(tmp_path / "set").token_count == 5


def test_a_lock_that_was_removed_before_it_was_taken_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed.fcntl, "flock", lambda file, _: os.unlink(file.name))
    with pytest.raises(DataError, match="another process is writing"):
        IndexedWriter(tmp_path / "set", np.dtype("uint16"))
