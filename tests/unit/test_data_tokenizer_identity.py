"""A prepared set records which tokenizer prepared it, and a run with another one is refused before it starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmtrain.checkpoint.convert.tokenizer import copy_tokenizer, special_tokens
from llmtrain.cli.main import main
from llmtrain.errors import BadInputError
from llmtrain.plan.resolve.prepare import check_recipe
from llmtrain.recipe.load import load_recipe
from llmtrain_data.checksums import TAIL, Encoding, checksums_path, read_checksums
from llmtrain_data.corpus import open_corpus
from llmtrain_data.corpus_options import CorpusOptions
from llmtrain_data.errors import DataError
from llmtrain_data.fingerprint import difference, fingerprint
from llmtrain_data.indexed import IndexedData, IndexedWriter
from llmtrain_data.prepare import PrepareOptions, prepare
from llmtrain_data.tokenizer import load_tokenizer, tokenizer_identity, train_tokenizer
from llmtrain_data.verify import write_checksums
from tokenizers import Tokenizer

RECIPE = "model: {preset: gpt2-1m}\ndata: {path: set, sequence_length: 16}\ntrain: {steps: 1}\noptimizer: {warmup: 0}\n"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe, two tokenizers of as many ids, and a set that the first one prepared."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    Path("text.txt").write_text("".join(f"def f(x):\n    return x + {i}\n" for i in range(500)))
    train_tokenizer(iter([["def f(x): return x + 1"] * 9]), 265, Path("mine"))
    train_tokenizer(iter([["other words, spaces  and numbers"] * 9]), 265, Path("other"))
    prepare(open_corpus("text.txt", CorpusOptions()), Path("mine"), Path("set"), PrepareOptions())
    return tmp_path


def check(*overrides: str) -> None:
    check_recipe(load_recipe("recipe.yaml", list(overrides)))


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_run_with_another_tokenizer_is_refused(
    work: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "recipe.yaml", "data.tokenizer=other", "--nproc", "1", *more]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "llmtrain: data.tokenizer is other, but the set set of data.path was prepared with another tokenizer; set "
        "data.tokenizer to the one that prepared it, or prepare its texts again with other\n"
    )
    check("data.tokenizer=mine")
    check()


def test_a_blend_names_the_set(work: Path) -> None:
    prepare(open_corpus("text.txt", CorpusOptions()), Path("other"), Path("second"), PrepareOptions())
    with pytest.raises(BadInputError, match=r"^data\.tokenizer is mine, but the set second of data\.path was prepared"):
        check("data.path=[1,set,2,second]", "data.tokenizer=mine")


def test_the_tokenizer_of_a_hugging_face_model_counts_where_no_other_is_given(work: Path) -> None:
    keys = ("model.preset=null", "model.hf=other")
    with pytest.raises(BadInputError, match=r"^model\.hf is other, but the set set of data\.path was prepared"):
        check(*keys)
    check(*keys, "data.tokenizer=mine")
    load_tokenizer("other").save("other/tokenizer.json")
    tokenizer = json.loads(Path("other/tokenizer.json").read_text())
    Path("other/tokenizer.json").unlink()
    check(*keys)
    Path("other/vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]))
    merges = [one if isinstance(one, str) else " ".join(one) for one in tokenizer["model"]["merges"]]
    Path("other/merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    Path("other/tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(BadInputError, match=r"^model\.hf is other, but the set set of data\.path was prepared"):
        check(*keys)


def test_sets_that_record_no_tokenizer_go_with_any(work: Path) -> None:
    whole = checksums_path("set").read_bytes()
    checksums_path("set").write_bytes(whole[: -TAIL.size])
    check("data.tokenizer=other")
    checksums_path("set").unlink()
    check("data.tokenizer=other")
    write_checksums(Path("set"), overwrite=False)
    check("data.tokenizer=other")
    assert checksums_path("set").read_bytes() == whole[: -TAIL.size]


def test_the_record_is_not_part_of_the_data_that_a_run_resumes_on(work: Path) -> None:
    before = fingerprint(IndexedData("set"))
    write_checksums(Path("set"), overwrite=True)
    assert difference([before], [fingerprint(IndexedData("set"))]) == ""


def test_damage_to_the_record_is_noticed(work: Path) -> None:
    path = checksums_path("set")
    whole = path.read_bytes()
    assert read_checksums("set") is not None
    for place in range(len(whole) - TAIL.size, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DataError, match="does not match its own checksum"):
            read_checksums("set")
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="damaged or truncated"):
        read_checksums("set")


def rewritten(work: Path, change: Change) -> int:
    """Return the identity of a copy whose `tokenizer.json` was changed and laid out anew."""
    shutil.copytree("mine", "copy")
    content = json.loads(Path("copy/tokenizer.json").read_text())
    change(content)
    Path("copy/tokenizer.json").write_text(json.dumps(content, indent=7, sort_keys=True))
    return tokenizer_identity("copy")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: None,
        lambda content: content.update(truncation={"max_length": 8}, version="2.0"),
        lambda content: content["model"].update(merges=[" ".join(pair) for pair in content["model"]["merges"]]),
        lambda content: content["model"]["vocab"].pop("<|endoftext|>"),
    ],
    ids=["layout", "other keys", "merges as texts", "added token outside the vocabulary"],
)
def test_a_copy_has_the_same_identity(work: Path, change: Change) -> None:
    assert rewritten(work, change) == tokenizer_identity("mine")


def swap(vocab: dict[str, int]) -> None:
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


@pytest.mark.parametrize(
    "change",
    [
        lambda content: swap(content["model"]["vocab"]),
        lambda content: content["model"]["merges"].reverse(),
        lambda content: content["added_tokens"][0].update(content="</s>"),
    ],
    ids=["two ids swapped", "order of merges", "another added token"],
)
def test_what_encodes_otherwise_has_another_identity(work: Path, change: Change) -> None:
    assert rewritten(work, change) != tokenizer_identity("mine")


def test_a_list_of_pieces_is_told_apart(work: Path) -> None:
    """Unigram models have a list of tokens and scores in place of ids."""
    found = set()
    for pieces in ([["a", -1.0], ["b", -2.0]], [["b", -2.0], ["a", -1.0]], [["a", -1.0], ["b", -3.0]]):
        Path("mine/tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram", "vocab": pieces}}))
        found.add(tokenizer_identity("mine"))
    assert len(found) == 3


def test_the_old_layout_of_a_folder_has_the_same_identity(work: Path) -> None:
    """GPT-2's folders once had vocab.json and merges.txt alone."""
    before = tokenizer_identity("mine")
    Tokenizer.from_file("mine/tokenizer.json").model.save("mine")
    Path("mine/tokenizer.json").unlink()
    settings = json.loads(Path("mine/tokenizer_config.json").read_text())
    Path("mine/tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "GPT2Tokenizer"}))
    assert tokenizer_identity("mine") == before


def test_an_empty_set_records_its_tokenizer(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "set", np.dtype(np.uint16), Encoding(5))
    writer.add(np.zeros(0), np.zeros(1))
    writer.commit()
    found = read_checksums(tmp_path / "set")
    assert found is not None
    assert (found.encoding, len(found.blocks)) == (Encoding(5), 0)


def test_a_tokenizer_travels_whose_class_stands_in_the_model(tmp_path: Path) -> None:
    """As in folders with vocab.json, merges.txt and a model's config.json, which is not the tokenizer's."""
    own, copy = tmp_path / "own", tmp_path / "copy"
    own.mkdir()
    (own / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (own / "merges.txt").write_text("#version: 0.2\na b\n")
    (own / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert copy_tokenizer(own, copy)
    assert not (copy / "config.json").exists()
    assert tokenizer_identity(copy) == tokenizer_identity(own)
    assert special_tokens(copy) == special_tokens(own)
    assert load_tokenizer(copy).encode("ab").ids == load_tokenizer(own).encode("ab").ids == [2]
    # A folder with neither has nothing to load.
    (tmp_path / "none").mkdir()
    (tmp_path / "none/generation_config.json").write_text("{}")
    assert copy_tokenizer(tmp_path / "none", tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["generation_config.json"]
