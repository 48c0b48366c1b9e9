"""Preparation: both encoders give the same set, no partial files remain, and memory stays constant."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmtrain_data import encode
from llmtrain_data import prepare as prepare_module
from llmtrain_data.corpus import open_corpus
from llmtrain_data.corpus_options import CorpusOptions
from llmtrain_data.errors import DataError, PreparationStoppedError
from llmtrain_data.indexed import IndexedData, IndexedWriter
from llmtrain_data.prepare import Prepared, PrepareOptions, prepare
from llmtrain_data.readers import TextChunk
from llmtrain_data.tokenizer import END_OF_TEXT, load_tokenizer, tokenizer_size, train_tokenizer
from tokenizers import AddedToken

TEXT = "def f(x):\n    return x + 1  # na\u00efve\n\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    train_tokenizer(iter([[TEXT, "other words, spaces  and 123 numbers"]]), 300, folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of 40 texts and an empty one."""
    root = tmp_path / "in"
    root.mkdir()
    for i in range(40):
        (root / f"{i:02}.txt").write_text(TEXT * (i % 5 + 1) + f"number {i}")
    (root / "blank.txt").touch()
    return root


def run(source: Path, tokenizer: Path, prefix: Path, **options: Any) -> Prepared:
    return prepare(open_corpus(str(source), CorpusOptions()), tokenizer, prefix, PrepareOptions(**options))


@pytest.mark.parametrize("encoder", ["gigatoken", "tokenizers"])
def test_documents_are_the_texts_with_an_end(folder: Path, tokenizer: Path, tmp_path: Path, encoder: str) -> None:
    done = run(folder, tokenizer, tmp_path / "new" / "set", encoder=encoder, workers=2)
    data = IndexedData(tmp_path / "new" / "set")
    expected = [chunk.texts() for chunk in open_corpus(str(folder), CorpusOptions()).chunks()]
    reference = load_tokenizer(tokenizer)
    ids = [[*reference.encode(text).ids, 0] for texts in expected for text in texts]
    assert [data.document(i).tolist() for i in range(data.documents)] == ids
    assert (done.documents, done.tokens, done.encoder) == (40, sum(map(len, ids)), encoder)
    assert done.text_bytes == sum(len(text.encode()) for texts in expected for text in texts)
    assert data.dtype == np.uint16
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["set.bin", "set.checksums", "set.idx"]


def test_a_text_cut_in_pieces_ends_once(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT * 800)
    done = run(tmp_path / "a.txt", tokenizer, tmp_path / "set")
    data = IndexedData(tmp_path / "set")
    assert data.documents > 5
    assert np.flatnonzero(data.read(0, data.token_count) == 0).tolist() == [done.tokens - 1]
    assert load_tokenizer(tokenizer).decode(data.read(0, data.token_count - 1).tolist()) == TEXT * 800


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_both_encoders_give_the_same_set_of_odd_text(tokenizer: Path, tmp_path: Path, name: str) -> None:
    """Text that is not UTF-8, other scripts, the end of text inside a text, zero bytes, empty texts."""
    texts = ["dr\u00fcei \U0001f600", f"a{END_OF_TEXT}b", "", "\x01\n \t", "\u2028e\u0301"]
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    broken = b"caf\xe9 \xff\xfe" if name == "a.txt" else b'{"text":"caf\xe9 \xff\xfe"}\n{"text":"\\ud800"}\n'
    (tmp_path / name).write_bytes(("\n".join(texts).encode() if name == "a.txt" else lines) + broken)
    for encoder in ("gigatoken", "tokenizers"):
        run(tmp_path / name, tokenizer, tmp_path / encoder, encoder=encoder, workers=1)
    assert (tmp_path / "gigatoken.bin").read_bytes() == (tmp_path / "tokenizers.bin").read_bytes()
    assert (tmp_path / "gigatoken.idx").read_bytes() == (tmp_path / "tokenizers.idx").read_bytes()


def test_without_end(folder: Path, tokenizer: Path, tmp_path: Path) -> None:
    run(folder, tokenizer, tmp_path / "set", append_end=False)
    assert 0 not in np.fromfile(tmp_path / "set.bin", np.uint16)


def test_an_encoder_that_differs_is_not_taken(
    folder: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = encode.encode_with
    monkeypatch.setattr(encode, "encode_with", lambda *given: (right(*given)[0] + 1, right(*given)[1]))
    done = run(folder, tokenizer, tmp_path / "set", workers=1)
    assert done.encoder == "tokenizers"
    assert "gigatoken and tokenizers give different ids" in done.reason
    with pytest.raises(DataError, match="leave out --encoder gigatoken"):
        run(folder, tokenizer, tmp_path / "other", encoder="gigatoken")


def test_a_token_that_is_a_single_word_is_none_within_another(folder: Path, tokenizer: Path, tmp_path: Path) -> None:
    made = load_tokenizer(tokenizer)
    made.add_tokens([AddedToken("foo", single_word=True)])
    own = shutil.copytree(tokenizer, tmp_path / "own")
    made.save(str(own / "tokenizer.json"))
    done = run(folder, own, tmp_path / "set", workers=1)
    assert done.reason == "gigatoken and tokenizers give different ids, first for 'foofoo'"


def test_an_encoder_that_fails_is_not_taken(
    folder: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode.Gigatoken, "load", lambda self: 1 / 0)
    done = run(folder, tokenizer, tmp_path / "set", workers=1)
    assert done.encoder == "tokenizers"
    assert "does not support this tokenizer" in done.reason


@pytest.mark.parametrize("loaded", [True, False])
def test_awkward_is_neither_loaded_nor_used_nor_lost(
    folder: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    monkeypatch.delitem(sys.modules, "awkward", raising=False)
    other = object()
    if loaded:
        monkeypatch.setitem(sys.modules, "awkward", other)
    run(folder, tokenizer, tmp_path / "set", encoder="gigatoken")
    assert sys.modules.get("awkward") is (other if loaded else None)
    (tmp_path / "other.jsonl").write_text('{"body": "text"}\n')
    with pytest.raises(DataError, match="no text in field"):
        run(tmp_path / "other.jsonl", tokenizer, tmp_path / "none")
    assert sys.modules.get("awkward") is (other if loaded else None)


@pytest.mark.parametrize("long", [0, 10**9])
def test_ends_are_put_after_finished_texts(long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "LONG", long)
    chunk = TextChunk([b"aa", b"", b"b", b"ccc"], np.array([True, True, False, True]), 9)
    ids, lengths = np.array([1, 1, 2, 3, 3, 3], np.uint32), np.array([2, 0, 1, 3])
    encoded = encode.assemble(chunk, chunk.texts(), ids, lengths, encode.DocumentFormat(None, 0, np.dtype("uint16")))
    assert encoded.ids.tolist() == [1, 1, 0, 2, 3, 3, 3, 0]
    assert encoded.ids.dtype == np.uint16
    assert encoded.lengths.tolist() == [3, 1, 4]
    assert (encoded.text_bytes, encoded.empty, encoded.done) == (6, 1, 9)


def test_caches_are_emptied_without_changing_ids(
    folder: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, load, cores = list[encode.Gigatoken](), encode.Gigatoken.load, 2

    def counted(encoder: encode.Gigatoken) -> object:
        loads.append(encoder)
        return load(encoder)

    run(folder, tokenizer, tmp_path / "a", workers=cores)
    monkeypatch.setattr(encode.Gigatoken, "load", counted)
    monkeypatch.setattr(encode, "CACHE", -(1 << 40))
    monkeypatch.setattr(encode, "REFILL", 1)
    monkeypatch.setattr("llmtrain_data.readers.CHUNK", 100)
    run(folder, tokenizer, tmp_path / "b", workers=cores)
    assert len(loads) > cores
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_flat(tokenizer: Path, tmp_path: Path) -> None:
    """Eight times the text takes more memory by at most a quarter of the additional text."""
    # Read VmHWM, because ru_maxrss starts at the parent process's value.
    code = (
        "import sys; from llmtrain.cli.main import main\n"
        "if __name__ == '__main__':\n"
        "    code = main()\n"
        "    print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
        "    sys.exit(code)"
    )
    line, peaks = json.dumps({"text": TEXT * 20}) + "\n", list[int]()
    for megabytes in (8, 64):
        source = tmp_path / f"{megabytes}.jsonl"
        source.write_text(line * (megabytes * 2**20 // len(line)))
        command = [sys.executable, "-c", code, "data", "prepare", str(source), "--tokenizer", str(tokenizer)]
        command += ["--output", str(tmp_path / f"set{megabytes}"), "--encoder", "gigatoken", "--workers", "1"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.splitlines()[-1]) * 1024)
    assert peaks[1] - peaks[0] < (64 - 8) * 2**20 / 4, peaks


def test_an_existing_set_is_kept(folder: Path, tokenizer: Path, tmp_path: Path) -> None:
    run(folder, tokenizer, tmp_path / "set")
    before = (tmp_path / "set.bin").read_bytes()
    (folder / "new.txt").write_text("new")
    with pytest.raises(DataError, match=r"set\.idx already exist; .*--overwrite to replace them"):
        run(folder, tokenizer, tmp_path / "set")
    assert (tmp_path / "set.bin").read_bytes() == before
    assert run(folder, tokenizer, tmp_path / "set", overwrite=True).documents == 41


def test_a_failure_leaves_nothing(tokenizer: Path, tmp_path: Path) -> None:
    lines = '{"text":"fine"}\n' * 300000 + "{broken\n"
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(DataError, match="line 300001 is not JSON"):
        run(tmp_path / "a.jsonl", tokenizer, tmp_path / "out" / "set")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("encoder", ["gigatoken", "tokenizers"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_at_work(tokenizer: Path, tmp_path: Path, number: signal.Signals, encoder: str) -> None:
    """The reader sleeps after its second chunk, so that the signal always comes during the preparation."""
    source, out = tmp_path / "pipe.jsonl", tmp_path / "out"
    source.write_text('{"text":"some words"}\n' * 200000)
    code = (
        "import sys, time; from llmtrain_data import readers; from llmtrain.cli.main import main\n"
        "whole = readers.read_jsonl\n"
        "def slowly(*given):\n"
        "    for number, chunk in enumerate(whole(*given)):\n"
        "        yield chunk\n"
        "        time.sleep(60 if number else 0)\n"
        "readers.read_jsonl = slowly\n"
        "if __name__ == '__main__': sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "data", "prepare", str(source), "--tokenizer", str(tokenizer)]
    command += ["--output", str(out / "set"), "--encoder", encoder, "--workers", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (out / "set.bin.partial").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=60)
    if number != signal.SIGKILL:
        assert process.returncode == (130 if number == signal.SIGINT else 1)
        assert f"stopped by {number.name}: " in errors
        assert "were not written" in errors
        assert "run the same command again" in errors
        assert "Traceback" not in errors
        assert list(out.iterdir()) == []
    assert not (out / "set.bin").exists()
    assert not (out / "set.idx").exists()
    done = run(source, tokenizer, out / "set")
    assert sorted(path.name for path in out.iterdir()) == ["set.bin", "set.checksums", "set.idx"]
    assert done.documents == 200000


def test_a_signal_as_the_files_are_made_leaves_none(
    folder: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*given: Any) -> IndexedWriter:
        writer = IndexedWriter(*given)
        os.kill(os.getpid(), signal.SIGTERM)
        return writer

    monkeypatch.setattr(prepare_module, "IndexedWriter", make)
    with pytest.raises(PreparationStoppedError, match="stopped by SIGTERM"):
        run(folder, tokenizer, tmp_path / "out" / "set")
    assert list((tmp_path / "out").iterdir()) == []


def test_killed_between_the_two_renames(folder: Path, tokenizer: Path, tmp_path: Path) -> None:
    run(folder, tokenizer, tmp_path / "set")
    (tmp_path / "set.idx").rename(tmp_path / "set.idx.partial")
    with pytest.raises(DataError, match=r"set\.idx not found"):
        IndexedData(tmp_path / "set")
    assert run(folder, tokenizer, tmp_path / "set").documents == 40


def test_trained_tokenizer_is_a_hugging_face_folder(tokenizer: Path) -> None:
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(tokenizer)
    assert len(loaded) == tokenizer_size(tokenizer) == 300
    assert [loaded.bos_token, loaded.eos_token, loaded.pad_token] == [END_OF_TEXT] * 3
    assert loaded.decode(loaded.encode(TEXT)) == TEXT
    assert loaded.encode(TEXT) == load_tokenizer(tokenizer).encode(TEXT).ids


def test_tokenizer_size_counts_added_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model":{"vocab":{"a":0,"b":1}},"added_tokens":[{"id":7,"content":"<x>"}]}')
    assert tokenizer_size(tmp_path) == 8
    path.write_text('{"model":{"vocab":[["a",-1.0],["b",-2.0]]}}')
    assert tokenizer_size(tmp_path) == 2
    for broken in ("{", "[]", "{}"):
        path.write_text(broken)
        with pytest.raises(DataError, match=r"tokenizer\.json"):
            tokenizer_size(tmp_path)


@pytest.mark.parametrize(
    ("vocab", "added"), [({"a": 3 * 10**9}, 0), ({"a": 0}, 2**24), ({"a": -1, "b": 1}, 0), ({"a": 0}, -1)]
)
def test_an_id_that_no_model_has_is_refused(vocab: dict[str, int], added: int, tmp_path: Path) -> None:
    """Encoders keep a table of all ids, and store a larger id as another one."""
    description = {"model": {"vocab": vocab}, "added_tokens": [{"id": added, "content": "<x>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(DataError, match=r"has ids from .*; expected 0 to 16777215; use another tokenizer"):
        tokenizer_size(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.json"])
def test_a_tokenizer_without_an_id_is_refused(file: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / file).write_text('{"model":{"vocab":{}}}' if file == "tokenizer.json" else "{}")
    (tmp_path / "merges.txt").touch()
    config = {"tokenizer_class": "GPT2Tokenizer", "unk_token": None, "bos_token": None, "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="has an empty vocabulary"):
        tokenizer_size(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without importing transformers, which takes seconds."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="holds no usable Hugging Face tokenizer: it has no tokenizer"):
        tokenizer_size(tmp_path)


def test_files_with_the_names_of_other_trainers(tokenizer: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    megatron, neox = tmp_path / "megatron", tmp_path / "neox"
    for folder in (megatron, neox):
        folder.mkdir()
    shutil.copy(tokenizer / "tokenizer.json", neox / "20B_tokenizer.json")
    (megatron / "gpt2-vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, END_OF_TEXT: 3}))
    (megatron / "gpt2-merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.raises(DataError, match=r"tokenizer: rename 20B_tokenizer\.json to tokenizer\.json$"):
        tokenizer_size(neox)
    asked = "rename gpt2-vocab.json to vocab.json, rename gpt2-merges.txt to merges.txt, write {config} to {file}"
    config, file = '{"tokenizer_class": "GPT2Tokenizer"}', "tokenizer_config.json"
    with pytest.raises(DataError, match=re.escape(asked.format(config=config, file=file)) + "$"):
        tokenizer_size(megatron)
    for name in ("vocab.json", "merges.txt"):
        (megatron / f"gpt2-{name}").rename(megatron / name)
    (megatron / file).write_text(config)
    assert tokenizer_size(megatron) == 4


def test_a_tokenizer_without_end_of_text(folder: Path, tokenizer: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    content = (tokenizer / "tokenizer.json").read_text().replace(END_OF_TEXT, "<other>")
    (bare / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"no end-of-text token.*--no-eod"):
        run(folder, bare, tmp_path / "set")
    (bare / "tokenizer_config.json").write_text('{"eos_token":{"content":"<other>"}}')
    assert run(folder, bare, tmp_path / "set").documents == 40


def on_a_terminal(words: list[str]) -> str:
    """Run a command on a terminal and return what it showed there."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    command = [sys.executable, "-m", "llmtrain", *words]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    # At the end of the terminal's last process, a read raises OSError.
    with suppress(OSError):
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert process.wait() == 0, shown
    return shown.decode()


def test_a_terminal_always_shows_what_is_going_on(folder: Path, tmp_path: Path) -> None:
    made = str(tmp_path / "made")
    shown = on_a_terminal(["data", "tokenizer", str(folder), "--vocab-size", "300", "--output", made])
    assert shown.index("loading the libraries") < shown.index("input      ")
    shown = on_a_terminal(["data", "prepare", str(folder), "--tokenizer", made, "--output", str(tmp_path / "set")])
    order = ("loading the libraries", "input      ", "loading the tokenizer", "choosing the encoder", "documents  ")
    places = [shown.index(text) for text in order]
    assert places == sorted(places)


def test_training_a_tokenizer_says_that_it_merges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmtrain_data.waiting.PATIENCE", 0.02)
    random = np.random.default_rng(0)
    texts = [" ".join("".join(map(chr, random.integers(97, 123, 7))) for _ in range(20_000)) for _ in range(4)]
    train_tokenizer(iter([texts]), 4000, tmp_path / "made")
    assert "merging words into 4000 ids  (" in capsys.readouterr().err
