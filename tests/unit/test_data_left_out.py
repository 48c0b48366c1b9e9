"""What a preparation leaves out of a folder or replaces in a file, and errors about files in it."""

import gzip
import os
import re
from pathlib import Path

import numpy as np
import pytest
from llmtrain.cli.main import main
from llmtrain_data.streams import LARGE, is_utf8
from llmtrain_data.tokenizer import train_tokenizer

TEXT = "def f(x):\n    return x + 1  # na\u00efve\n\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    train_tokenizer(iter([[TEXT]]), 300, folder)
    return folder


def test_files_that_are_left_out_are_told_with_the_reason(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    (texts / ".git").mkdir(parents=True)
    for number in range(30):
        (texts / f"{number}.txt").write_text(f"text {number}")
    for number in range(5):
        (texts / f"{number}.png").write_bytes(b"\x89PNG\0\0\0\r" * 9)
    (texts / ".git" / "HEAD").write_text("ref")
    (texts / "nothing.txt").touch()
    os.mkfifo(texts / "pipe")
    assert main(["data", "prepare", str(texts), "--tokenizer", str(tokenizer), "--output", str(tmp_path / "set")]) == 0
    lines = capsys.readouterr().out.splitlines()
    # 38 files, of which 5, 1, 1 and 1 are left out.
    assert "input      38 files in a fixed shuffled order (35 text)" in lines
    assert "documents  30" in lines
    said = [line for line in lines if line.startswith("left out")]
    text = r"5 files, not UTF-8 text \(binary, or in another encoding; iconv converts\)"
    assert re.fullmatch(rf"left out   {text}: (\d.png, ){{2}}\d.png and 2 more \(--list-left-out lists all\)", said[0])
    assert sorted(said[1:]) == [
        "left out   1 file, empty: nothing.txt",
        "left out   1 file, hidden: HEAD",
        "left out   1 file, not regular: pipe",
    ]


@pytest.mark.parametrize("command", ["prepare", "tokenizer"])
def test_all_files_that_are_left_out_or_changed_can_be_listed(
    command: str, tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number, encoding in enumerate(["utf-16", "cp1251", "shift-jis", "utf-16-be"]):
        (texts / f"{number}.txt").write_text("Привет, мир. " * 99, encoding=encoding)
    for number in range(4, 8):
        (texts / f"{number}.txt").write_text("Grüße an alle, die lesen. " * 99, encoding="latin-1")
    (texts / "good.txt").write_text(TEXT * 99)
    how = ["--tokenizer", str(tokenizer)] if command == "prepare" else ["--vocab-size", "257"]
    output = str(tmp_path / "output")
    assert main(["data", command, str(texts), *how, "--output", output, "--list-left-out"]) == 0
    said = capsys.readouterr().out.splitlines()
    begin = said.index("left out   4 files, not UTF-8 text (binary, or in another encoding; iconv converts):")
    assert sorted(said[begin + 1 : begin + 5]) == [str(texts / f"{number}.txt") for number in range(4)]
    assert said[begin + 5].startswith("note       4 files have bytes that are not UTF-8, which became U+FFFD (iconv")
    assert sorted(said[begin + 6 :]) == [str(texts / f"{number}.txt") for number in range(4, 8)]


def prepared(source: Path, tokenizer: Path, folder: Path, *options: str) -> int:
    words = ["data", "prepare", str(source), "--tokenizer", str(tokenizer), "--output", str(folder / "set")]
    return main([*words, *options])


@pytest.mark.parametrize("name", ["l.txt", "l.txt.gz", "l.jsonl"])
@pytest.mark.parametrize("alone", [True, False])
def test_files_with_bytes_that_are_not_utf8_are_named(
    name: str, alone: bool, tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    content = b'{"text": "' + b"A caf\xe9 in Paris. " * 200_000 + b'"}\n'
    (texts / name).write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
    if not alone:
        (texts / "good.txt").write_text("Grüße " * 100)
    assert prepared(texts / name if alone else texts, tokenizer, tmp_path) == 0
    said = f"1 file has bytes that are not UTF-8, which became U+FFFD (iconv converts other encodings): {name}\n"
    assert capsys.readouterr().out.endswith(said)


@pytest.mark.parametrize("size", [100, 2 * LARGE])
def test_utf8_is_told_from_other_bytes(size: int) -> None:
    cut = ("漢字 Grüße 🙂 " * size).encode()[:size].decode(errors="ignore").encode()
    for good in (b"a" * size, cut, b""):
        assert is_utf8(good)
    # A byte of latin-1, a character cut at the end, a surrogate, and a character that is longer than it needs to be.
    for bad in (b"caf\xe9", "é".encode()[:1], b"\xed\xa0\x80", b"\xc0\xaf"):
        assert not is_utf8(cut + bad)
        assert not is_utf8(bad + cut)


def test_a_folder_without_texts_says_what_it_left_out(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "nothing.txt").touch()
    assert prepared(texts, tokenizer, tmp_path) == 2
    assert capsys.readouterr().err.endswith("matches --glob '*'; left out 1 file, empty: nothing.txt\n")
    (texts / "a.png").write_bytes(b"\x89PNG\0\0\0\r")
    assert prepared(texts, tokenizer, tmp_path) == 2
    assert capsys.readouterr().err.endswith(
        "the input has no text: a.png; left out 1 file, empty: nothing.txt; "
        "left out 1 file, not UTF-8 text (binary, or in another encoding; iconv converts): a.png\n"
    )


def test_a_truncated_file_in_a_folder_can_be_left_out(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    random = np.random.default_rng(0)
    content = gzip.compress(bytes(random.integers(97, 123, 100_000).astype(np.uint8)))
    (texts / "cut.txt.gz").write_bytes(content[: len(content) // 2])
    (texts / "good.txt").write_text(TEXT)
    assert prepared(texts, tokenizer, tmp_path) == 2
    assert capsys.readouterr().err.endswith(
        "; check that it is whole and what its name says, or leave it out with --glob\n"
    )
    assert prepared(texts, tokenizer, tmp_path, "--glob", "*.txt") == 0
