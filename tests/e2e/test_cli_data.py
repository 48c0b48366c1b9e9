"""`llmtrain data` on the command line, from a text to a blend."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from llmtrain.cli.main import main
from llmtrain_data.checksums import TAIL

TEXT = "def f(x):\n    return x + 1\n\n"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, a JSONL file, a tokenizer and two prepared sets."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "a.txt").write_text("".join(f"{TEXT}# {i}\n" for i in range(3000)))
    lines = [json.dumps({"body": f"{i} {TEXT}"}) for i in range(500)]
    (folder / "b.jsonl").write_text("\n".join(lines))
    assert call("tokenizer", folder / "a.txt", "--vocab-size", 300, "--output", folder / "bpe") == 0
    prepare = ("--tokenizer", folder / "bpe", "--output")
    assert call("prepare", folder / "a.txt", *prepare, folder / "a") == 0
    assert call("prepare", folder / "b.jsonl", "--text-key", "body", *prepare, folder / "b") == 0
    return folder


def call(*words: object) -> int:
    return main(["data", *map(str, words)])


def test_prepare_says_what_it_did(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("prepare", work / "b.jsonl", "--text-key", "body", "--tokenizer", work / "bpe")
    assert call(*words, "--output", work / "b", "--overwrite") == 0
    out = capsys.readouterr().out
    assert "encoder    gigatoken (same ids as tokenizers on" in out
    assert "documents  500\n" in out
    assert f"{work / 'b'}.bin and {work / 'b'}.idx in" in out


def test_inspect(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("inspect", work / "b", "--json", "--tokenizer", work / "bpe", "--documents", 2) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["documents"] == shown["sequences"] == 500
    assert shown["dtype"] == "uint16"
    assert shown["vocab"] == 300
    assert shown["shown"] == [f"{i} {TEXT}<|endoftext|>" for i in range(2)]
    assert shown["tokens"] == pytest.approx(shown["lengths"]["mean"] * 500)
    assert 1 < shown["unigram_entropy"] < 5.8
    assert call("inspect", work / "b") == 0
    assert "500 (500 sequences)" in capsys.readouterr().out


def test_verify_and_checksum(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prepared set without checksums gets them; later damage is reported with exit code 1."""
    for suffix in (".bin", ".idx"):
        shutil.copy(work / f"a{suffix}", tmp_path)
    assert call("inspect", tmp_path / "a", "--verify") == 2
    assert f"`llmtrain data checksum {tmp_path}/a` writes" in capsys.readouterr().err
    assert call("checksum", tmp_path / "a") == 0
    # Only the preparation knows the tokenizer.
    assert (tmp_path / "a.checksums").read_bytes() == (work / "a.checksums").read_bytes()[: -TAIL.size]
    capsys.readouterr()
    assert call("inspect", tmp_path / "a", "--verify", "--documents", 3) == 2
    assert call("inspect", tmp_path / "a", "--verify", "--tokenizer", work / "bpe") == 2
    assert "--verify shows no documents; leave out --tokenizer and --documents" in capsys.readouterr().err
    assert call("inspect", tmp_path / "a", "--verify") == 0
    assert re.search(r"verified +no damage found\n", capsys.readouterr().out)
    content = bytearray((tmp_path / "a.bin").read_bytes())
    content[-1] ^= 1
    (tmp_path / "a.bin").write_bytes(content)
    assert call("inspect", tmp_path / "a", "--verify", "--json") == 1
    shown = json.loads(capsys.readouterr().out)
    first = (len(content) - 1) // shown["block_bytes"] * shown["block_bytes"]
    assert shown["damaged"] == [{"file": f"{tmp_path}/a.bin", "first": first, "last": len(content)}]
    assert call("inspect", tmp_path / "a", "--verify") == 1
    said = capsys.readouterr().out
    assert re.match(rf"damaged blocks +1 of {shown['blocks']}\n", said)
    assert re.search(r"what to do +copy the set again", said)
    assert call("inspect", tmp_path / "a") == 2
    assert f"a.bin does not match its checksums in bytes {first} to {len(content)}" in capsys.readouterr().err
    assert call("checksum", tmp_path / "a") == 2
    assert call("checksum", tmp_path / "a", "--overwrite") == 0
    assert call("inspect", tmp_path / "a") == 0


def test_blend_shows_epochs_and_the_recipe(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("blend", "0.75", work / "a", "0.25", work / "b", "--sequence-length", "64")
    assert call(*words, "--tokens", "1M", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["tokens"] == 10**6
    assert [part["drawn"] for part in plan["parts"]] == [750000, 250000]
    assert [part["epochs"] for part in plan["parts"]] == [
        pytest.approx(part["drawn"] / part["available"], abs=1e-3) for part in plan["parts"]
    ]
    assert call(*words) == 0
    out = capsys.readouterr().out
    assert f"data:\n  path: [0.75, {work / 'a'}, 0.25, {work / 'b'}]\n  sequence_length: 64\n" in out


def test_blend_without_weights_takes_each_source_once(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("blend", work / "a", work / "b", "--sequence-length", "64", "--json") == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    assert [part["epochs"] for part in parts] == [pytest.approx(1, abs=0.02)] * 2


def test_tokenizer_refuses_to_replace(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (work / "bpe" / "tokenizer.json").read_bytes()
    assert call("tokenizer", work / "a.txt", "--vocab-size", 280, "--output", work / "bpe") == 2
    assert "bpe already exists" in capsys.readouterr().err
    assert (work / "bpe" / "tokenizer.json").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prepare", "none.txt", "--tokenizer", "bpe", "--output", "new"], "none.txt not found"),
        (["prepare", "a.txt", "--tokenizer", "none", "--output", "new"], "no tokenizer folder none"),
        (["prepare", "a.txt", "--tokenizer", "bpe", "--output", "a"], "a.bin and a.idx"),
        (["prepare", "a.txt", "--tokenizer", "bpe", "--output", "a.bin"], "is not a prefix"),
        (["prepare", "a.txt", "--tokenizer", "bpe", "--output", "a.txt/new"], "cannot be written"),
        (
            ["prepare", "a.txt", "--tokenizer", "bpe", "--output", "new", "--encoder", "x"],
            "'x' is not one of",
        ),
        (["prepare", "a.txt", "--tokenizer", "bpe", "--output", "new", "--workers", "-1"], "--workers"),
        (["prepare", "a.txt", "--tokenizer", "bpe"], "--output"),
        (["prepare", "b.jsonl", "--tokenizer", "bpe", "--output", "new"], "only body"),
        (["prepare", "b.jsonl", "--tokenizer", "bpe", "--output", "new", "--input-format", "parquet"], "b.jsonl"),
        (["tokenizer", "a.txt", "--vocab-size", "100", "--output", "new"], "at least 257"),
        (["tokenizer", "a.txt", "--vocab-size", "-5", "--output", "new"], "at least 257"),
        (["tokenizer", "a.txt", "--vocab-size", "many", "--output", "new"], "--vocab-size"),
        (["inspect", "none"], "none.bin and none.idx not found"),
        (["inspect", "a", "--tokenizer", "none"], "no tokenizer folder none"),
        (["blend", "0.5"], "expected a blend"),
        (["blend", "-1", "a"], "-1"),
        (["blend", "a", "--tokens", "-3"], "--tokens"),
        (["blend", "a", "--split", "0,1,1"], "split is [0.0, 1.0, 1.0]; expected shares from 0"),
        (["blend", "a", "--split", "1,2"], "--split is '1,2'"),
    ],
)
def test_mistakes_are_one_sentence_and_write_nothing(
    work: Path,
    words: Sequence[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(work)
    before = sorted(work.rglob("*"))
    assert call(*words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert sorted(work.rglob("*")) == before


def test_a_separator_is_typed_with_its_line_ends(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.txt").write_text("one\n\ntwo\nthree\n\nfour")
    words = ("prepare", tmp_path / "c.txt", "--tokenizer", work / "bpe", "--output", tmp_path / "c")
    assert call(*words, "--separator", r"\n\n") == 0
    assert "documents  3\n" in capsys.readouterr().out


def test_a_tokenizer_does_not_replace_the_folder_one_is_in(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("tokenizer", work / "a.txt", "--vocab-size", 300, "--output", ".") == 2
    assert "--output . already exists; give another folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_cannot_be_written_is_refused_before_it_is_trained(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    output = tmp_path / "file/bpe"
    assert call("tokenizer", tmp_path / "no.txt", "--vocab-size", 300, "--output", output) == 2
    assert f"--output {output} cannot be written: Not a directory" in capsys.readouterr().err


def test_names_that_are_no_text_are_shown_escaped(work: Path, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    Path(os.fsdecode(path)).write_text(TEXT)
    words: list[Any] = [sys.executable, "-m", "llmtrain", "data", "prepare", path, "--tokenizer", work / "bpe"]
    done = subprocess.run([*words, "--output", tmp_path / "d"], capture_output=True, check=True)
    assert rb"input      caf\udce9.txt (text)" in done.stdout
