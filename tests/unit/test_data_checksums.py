"""Damage to a prepared set is found: when a block is first read, after a change during reading, and by a full check."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from llmtrain_data import dataset, ids
from llmtrain_data.bounds import MAX_IDS
from llmtrain_data.checksums import CHECKSUM_BLOCK, HEADER, ChecksumsWriter, checksums_path, read_checksums
from llmtrain_data.config import DataConfig
from llmtrain_data.dataset import Samples, open_split
from llmtrain_data.describe import describe
from llmtrain_data.errors import DataError
from llmtrain_data.fingerprint import SAMPLED, difference, fingerprint
from llmtrain_data.indexed import IndexedData, IndexedWriter
from llmtrain_data.verify import verify, write_checksums

VOCAB, LENGTH = 1000, 64
FLIPS = [pytest.param(10), pytest.param(200, marks=pytest.mark.soak)]


def write(prefix: Path, tokens: np.ndarray, piece: int = 5000) -> Path:
    """Write a set of documents of 100 tokens, in writes of `piece` tokens."""
    writer = IndexedWriter(prefix, tokens.dtype)
    for start in range(0, len(tokens), piece):
        some = tokens[start : start + piece]
        writer.add(some, np.full(len(some) // 100, 100))
    writer.commit()
    return prefix


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A set of four blocks, of which the last is short."""
    return write(tmp_path / "set", np.random.default_rng(0).integers(0, VOCAB, 120_000, np.uint16))


def opened(*path: str | float | Path, vocab: int = VOCAB) -> Samples:
    parts = [part if isinstance(part, int | float) else str(part) for part in path]
    config = DataConfig(path=str(parts[0]) if len(parts) == 1 else parts, sequence_length=LENGTH, split=(1, 0, 0))
    return open_split(config, "train", vocab)


def read_all(samples: Samples, epoch: int = 0) -> None:
    for first in range(epoch * len(samples), (epoch + 1) * len(samples), 50):
        samples.batch(0, first, 50)


def flip(path: Path, random: np.random.Generator) -> int:
    """Change a bit, or a byte, and return its position."""
    with open(path, "r+b") as file:
        place = int(random.integers(0, path.stat().st_size))
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        change = 1 << int(random.integers(0, 8)) if random.integers(0, 2) else int(random.integers(1, 256))
        file.write(bytes([byte ^ change]))
    return place


@pytest.mark.parametrize("flips", FLIPS)
def test_every_flip_is_noticed_when_its_block_is_read(prefix: Path, flips: int) -> None:
    path, random = Path(f"{prefix}.bin"), np.random.default_rng(1)
    whole = path.read_bytes()
    for _ in range(flips):
        place = flip(path, random)
        block = place // CHECKSUM_BLOCK
        with pytest.raises(DataError, match=rf"set\.bin does not match .* bytes {block * CHECKSUM_BLOCK} to"):
            read_all(opened(prefix))
        assert [(one.first, one.last) for one in verify(prefix).damaged] == [
            (block * CHECKSUM_BLOCK, min((block + 1) * CHECKSUM_BLOCK, len(whole)))
        ]
        path.write_bytes(whole)
    read_all(opened(prefix))


@pytest.mark.parametrize("flips", FLIPS)
def test_every_flip_under_a_reader_is_noticed(prefix: Path, flips: int) -> None:
    """The damage is found also in blocks that were sound when they were first read."""
    path, random = Path(f"{prefix}.bin"), np.random.default_rng(2)
    whole, samples = path.read_bytes(), opened(prefix)
    for _ in range(flips):
        read_all(samples)
        # A coarse clock of the file system must not hide the change.
        before = path.stat().st_mtime_ns
        flip(path, random)
        os.utime(path, ns=(before + 1, before + 1))
        with pytest.raises(DataError, match=r"set\.bin does not match"):
            read_all(samples, epoch=1)
        with open(path, "r+b") as file:
            file.write(whole)
        os.utime(path, ns=(before + 2, before + 2))


@pytest.mark.parametrize("flips", FLIPS)
@pytest.mark.parametrize("suffix", [".idx", ".checksums"])
def test_every_flip_of_what_is_beside_the_tokens_is_noticed(prefix: Path, suffix: str, flips: int) -> None:
    path, random = Path(f"{prefix}{suffix}"), np.random.default_rng(3)
    whole = path.read_bytes()
    for _ in range(flips):
        flip(path, random)
        with pytest.raises(DataError, match=r"set\.(idx|checksums)"):
            opened(prefix)
        path.write_bytes(whole)


@pytest.mark.parametrize("flips", FLIPS)
def test_without_checksums_a_small_set_has_another_fingerprint_after_every_flip(prefix: Path, flips: int) -> None:
    checksums_path(prefix).unlink()
    assert opened(prefix).unverified() == [str(prefix)]
    path, random = Path(f"{prefix}.bin"), np.random.default_rng(4)
    whole, before = path.read_bytes(), fingerprint(IndexedData(prefix))
    for _ in range(flips):
        flip(path, random)
        now = fingerprint(IndexedData(prefix))
        assert difference([before], [now]) == f"{prefix} holds other data than the run was trained on"
        path.write_bytes(whole)
    assert difference([before], [fingerprint(IndexedData(prefix))]) == ""


def test_only_what_is_read_is_verified(prefix: Path) -> None:
    with open(f"{prefix}.bin", "r+b") as file:
        file.seek(3 * CHECKSUM_BLOCK)
        file.write(b"\xff\xff")
    data = IndexedData(prefix)
    data.read(0, 3 * CHECKSUM_BLOCK // 2)
    with pytest.raises(DataError, match=rf"bytes {3 * CHECKSUM_BLOCK} to 240000"):
        data.read(3 * CHECKSUM_BLOCK // 2 - 1, 3 * CHECKSUM_BLOCK // 2 + 1)


def test_a_file_that_is_cut_under_its_reader_does_not_kill_the_process(prefix: Path) -> None:
    for unverified in (False, True):
        if unverified:
            checksums_path(prefix).unlink()
        samples, size = opened(prefix), os.path.getsize(f"{prefix}.bin")
        os.truncate(f"{prefix}.bin", 1000)
        with pytest.raises(DataError, match=rf"set\.bin was truncated from {size} to 1000 bytes"):
            samples.batch(0, 0, 1)
        os.truncate(f"{prefix}.bin", size)


def test_checksums_do_not_depend_on_how_a_set_was_written(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, VOCAB, 3 * CHECKSUM_BLOCK // 100 * 100, np.uint16)
    for name, piece in (("a", 100), ("b", 32_800), ("c", len(tokens))):
        write(tmp_path / name, tokens, piece)
    wanted = checksums_path(tmp_path / "a").read_bytes()
    assert checksums_path(tmp_path / "b").read_bytes() == checksums_path(tmp_path / "c").read_bytes() == wanted
    checksums_path(tmp_path / "c").unlink()
    assert write_checksums(tmp_path / "c", overwrite=False) == 6
    assert checksums_path(tmp_path / "c").read_bytes() == wanted
    with pytest.raises(DataError, match="already exists"):
        write_checksums(tmp_path / "c", overwrite=False)


@pytest.mark.parametrize("size", [0, 100, CHECKSUM_BLOCK // 2 // 100 * 100])
def test_sets_of_any_size_are_verified(tmp_path: Path, size: int) -> None:
    prefix = write(tmp_path / "a", np.zeros(size, np.uint16))
    assert verify(prefix).damaged == []
    data = IndexedData(prefix)
    assert len(data.read(0, size)) == size
    assert fingerprint(data).bin_bytes == 2 * size


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda whole: whole[:-100],
    "longer": lambda whole: whole + bytes(100),
    "reversed": lambda whole: whole[::-1],
    "none": lambda whole: b"",
}


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_verify_tells_of_damage_of_any_kind(prefix: Path, suffix: str, kind: str) -> None:
    path = Path(f"{prefix}{suffix}")
    path.write_bytes(DAMAGES[kind](path.read_bytes()))
    found = verify(prefix)
    assert {one.file for one in found.damaged} == {str(path)}
    assert json.loads(found.json())["damaged_bytes"] > 0
    assert found.facts()[1][1].startswith(f"{path}, bytes ")
    assert (found.facts()[0][1] == f"0 of {found.blocks}, and the index") is (suffix == ".idx")
    assert found.damaged_blocks <= found.blocks
    with pytest.raises(DataError, match=r"set\.(bin|idx)"):
        read_all(opened(prefix))


def test_damage_is_listed_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtrain_data.verify.LISTED", 30)
    prefix = write(tmp_path / "a", np.zeros(CHECKSUM_BLOCK * 50 // 100 * 100, np.uint16), 10**6)
    content = np.memmap(f"{prefix}.bin", np.uint8)
    content[:: 2 * CHECKSUM_BLOCK] = 1
    found = verify(prefix)
    assert (found.damaged_bytes, len(found.damaged)) == (50 * CHECKSUM_BLOCK, 30)
    assert [name for name, _ in found.facts()].count("damaged") == 21


@pytest.mark.parametrize("size", [0, 7, HEADER.size - 1, HEADER.size, HEADER.size + 8, HEADER.size + 31])
def test_checksums_that_are_cut_are_refused(prefix: Path, size: int) -> None:
    os.truncate(checksums_path(prefix), size)
    with pytest.raises(DataError, match=r"set\.checksums"):
        read_checksums(prefix)


def test_what_is_no_plain_file_is_refused_at_once(prefix: Path) -> None:
    for suffix in (".checksums", ".bin", ".idx"):
        path = Path(f"{prefix}{suffix}")
        path.rename(f"{path}.kept")
        os.mkfifo(path)
        with pytest.raises(DataError, match="it is not a regular file"):
            opened(prefix)
        path.unlink()
        Path(f"{path}.kept").rename(path)


def test_checksums_of_another_set_are_refused(prefix: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", np.ones(100, np.uint16))
    checksums_path(other).rename(checksums_path(prefix))
    with pytest.raises(DataError, match=r"set\.idx does not match .*data checksum .*set --overwrite"):
        opened(prefix)
    write_checksums(prefix, overwrite=True)
    read_all(opened(prefix))


def test_fingerprints_tell_sets_apart_and_not_where_they_lie(prefix: Path, tmp_path: Path) -> None:
    before = fingerprint(IndexedData(prefix))
    for suffix in (".bin", ".idx", ".checksums"):
        Path(f"{prefix}{suffix}").rename(f"{tmp_path}/moved{suffix}")
    moved = fingerprint(IndexedData(tmp_path / "moved"))
    other = fingerprint(IndexedData(write(tmp_path / "other", np.ones(120_000, np.uint16))))
    assert moved.path != before.path
    assert difference([before, other], [moved, other]) == ""
    swapped = difference([before, other], [other, before])
    assert swapped == f"{other.path} does not hold the data of {prefix}, which the run was trained on"
    assert difference([before], [before, other]) == "data.path names 2 sets, and the run was trained on 1"
    checksums_path(tmp_path / "moved").unlink()
    assert difference([before], [fingerprint(IndexedData(tmp_path / "moved"))]) == ""


def test_a_large_set_is_fingerprinted_by_checksums_or_by_samples(tmp_path: Path) -> None:
    """Only checksums show a change between the sampled blocks."""
    tokens = np.zeros(CHECKSUM_BLOCK * 3 * SAMPLED // 2 // 100 * 100, np.uint16)
    changed = tokens.copy()
    changed[CHECKSUM_BLOCK // 2 + 5] = 1
    was, now = (fingerprint(IndexedData(write(tmp_path / n, t, 10**7))) for n, t in (("a", tokens), ("b", changed)))
    assert was.sample == now.sample
    assert difference([was], [now])
    changed[:] = 1
    assert fingerprint(IndexedData(write(tmp_path / "c", changed, 10**7))).sample != was.sample


@pytest.mark.parametrize(("bad", "dtype"), [(-1, "int32"), (VOCAB, "int32"), (2**31 - 1, "int32"), (-5, "int8")])
@pytest.mark.parametrize("seen_at_start", [True, False])
def test_ids_that_are_not_of_the_vocabulary_are_refused_wherever_they_are_met(
    tmp_path: Path, bad: int, dtype: str, seen_at_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.ones(20_000, dtype)
    tokens[12_345] = bad
    prefix = write(tmp_path / "a", tokens)
    sentence = rf"a\.bin holds id {bad} at token 45 of document 123; expected 0 to {VOCAB - 1}"
    samples = opened(0.5, write(tmp_path / "good", np.ones(500, np.uint16)), 0.5, prefix)
    if seen_at_start:
        with pytest.raises(DataError, match=sentence):
            samples.check_ids()
    else:
        monkeypatch.setattr(dataset, "MAX_SCANNED", 1000)
        monkeypatch.setattr(dataset, "READ_AT_ONCE", 100)
        samples.check_ids()
    readers: list[Callable[[], object]] = [samples.unigram_entropy] if seen_at_start else []
    for read in (*readers, lambda: samples.batch(0, 0, 2 * 20_000 // LENGTH)):
        with pytest.raises(DataError, match=sentence):
            read()
    with pytest.raises(DataError, match=sentence):
        samples.sources[1].beginning(123, 100)
    monkeypatch.setattr(ids, "READ_AT_ONCE", 777)
    if not 0 <= bad < MAX_IDS:
        with pytest.raises(DataError, match=rf"a\.bin holds id {bad} at token 45 of document 123"):
            describe(prefix, None, 1)


def test_checksums_are_not_written_while_the_set_is_prepared(tmp_path: Path) -> None:
    for overwrite in (False, True):
        writer = IndexedWriter(tmp_path / "set", np.dtype("uint16"))
        writer.add(np.arange(4), np.array([4]))
        if overwrite:
            with pytest.raises(DataError, match="another process is writing"):
                write_checksums(tmp_path / "set", overwrite=True)
        writer.commit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.bin", "set.checksums", "set.idx"]


def test_a_set_is_not_prepared_while_its_checksums_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksums would combine the old tokens with the new index."""
    writer = IndexedWriter(tmp_path / "set", np.dtype("uint16"))
    writer.add(np.arange(4), np.array([4]))
    writer.commit()

    def opened(prefix: Path, verified: bool) -> IndexedData:
        with pytest.raises(DataError, match="another process is writing"):
            IndexedWriter(prefix, np.dtype("uint16"))
        return IndexedData(prefix, verified)

    monkeypatch.setattr("llmtrain_data.verify.IndexedData", opened)
    assert write_checksums(tmp_path / "set", overwrite=True) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.bin", "set.checksums", "set.idx"]


def test_checksums_on_a_full_disk_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = IndexedWriter(tmp_path / "set", np.dtype("uint16"))
    writer.add(np.arange(4), np.array([4]))
    writer.commit()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ChecksumsWriter, "finish", full)
    monkeypatch.setattr(ChecksumsWriter, "close", full)
    with pytest.raises(OSError, match="No space left"):
        write_checksums(tmp_path / "set", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.bin", "set.checksums", "set.idx"]


def test_more_sets_than_files_may_be_open(tmp_path: Path) -> None:
    program = (
        "import resource, sys, numpy as np; from pathlib import Path;"
        "from llmtrain_data.config import DataConfig; from llmtrain_data.dataset import open_split;"
        "from llmtrain_data.indexed import IndexedWriter;"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, int(sys.argv[2]) or hard));"
        "writer = IndexedWriter(Path(sys.argv[1]) / 'set', np.dtype('uint16'));"
        "writer.add(np.zeros(40), np.full(10, 4)); writer.commit();"
        "open_split(DataConfig(path=[1.0, f'{sys.argv[1]}/set'] * 20, sequence_length=2, split=(1, 0, 0)), 'train')"
    )
    for hard, expected in ((0, ""), (40, "Too many open files; raise the limit with ulimit -n")):
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path), str(hard)], capture_output=True, text=True, check=False
        )
        assert expected in done.stderr
        assert (done.returncode == 0) == (hard == 0)
        for path in tmp_path.iterdir():
            path.unlink()
