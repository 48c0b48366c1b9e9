"""Documents begin with the id that the tokenizer's template puts before a text, and so does what a model continues."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmtrain.checkpoint.save import Checkpointer
from llmtrain.checkpoint.state_shard import StateShard
from llmtrain.cli.main import main
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import Ranks
from llmtrain.errors import BadInputError
from llmtrain.inference import trained
from llmtrain.inference.generate import Sampling
from llmtrain.inference.trained import complete, open_model
from llmtrain.model.gpt import GPT
from llmtrain.model.tensors import model_units
from llmtrain_data import encode
from llmtrain_data.checksums import TAIL, TAIL_WITH_BEGIN, checksums_path, read_checksums
from llmtrain_data.corpus import open_corpus
from llmtrain_data.corpus_options import CorpusOptions
from llmtrain_data.errors import DataError
from llmtrain_data.fingerprint import Fingerprint, difference, fingerprint
from llmtrain_data.indexed import IndexedData
from llmtrain_data.prepare import Prepared, PrepareOptions, prepare
from llmtrain_data.readers import TextChunk
from llmtrain_data.tokenizer import begin_of_text_id, hf_tokenizer, load_tokenizer
from llmtrain_data.verify import write_checksums
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.in_process import train_here
from tests.unit.test_inference import CONFIG

BEGIN, END, OTHER = 2, 1, 0
TEXTS = ["hello world", " hello  there\n", "", "w\u00f6rld <s> hello", "lo" * 300]


def made(folder: Path, template: str | None) -> Path:
    """A byte-level BPE tokenizer with `template` as its post-processor."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<other>", "</s>", "<s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["hello world " * 50], trainer)
    if template is not None:
        ids = [(token, number) for number, token in enumerate(special)]
        single = processors.TemplateProcessing(
            single=template, pair=f"{template} $B", special_tokens=[*ids, ("<x>", 999)]
        )
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), single])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def bpe(tmp_path: Path) -> Path:
    return made(tmp_path / "bpe", "<s> $A")


def run(source: Path, tokenizer: Path, prefix: Path, **options: Any) -> Prepared:
    return prepare(open_corpus(str(source), CorpusOptions()), tokenizer, prefix, PrepareOptions(**options))


def corpus(folder: Path, kind: str) -> Path:
    """TEXTS as JSON lines, or as files that sort like them."""
    if kind == "jsonl":
        (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        return folder / "in.jsonl"
    (folder / "in").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "in" / f"{number}.txt").write_text(text)
    return folder / "in"


def documents(prefix: Path) -> list[list[int]]:
    data = IndexedData(prefix)
    return [data.document(number).tolist() for number in range(data.documents)]


@pytest.mark.parametrize("encoder", ["gigatoken", "tokenizers"])
@pytest.mark.parametrize("kind", ["jsonl", "folder"])
def test_a_document_is_what_transformers_makes_of_its_text_and_an_end(
    bpe: Path, tmp_path: Path, kind: str, encoder: str
) -> None:
    done = run(corpus(tmp_path, kind), bpe, tmp_path / "set", encoder=encoder, workers=2)
    tokenizer = hf_tokenizer(bpe)
    expected = [[*tokenizer.encode(text), END] for text in TEXTS if text]
    assert all(ids[0] == BEGIN for ids in expected)
    assert sorted(documents(tmp_path / "set")) == sorted(expected)
    assert done.tokens == sum(map(len, expected))
    assert IndexedData(tmp_path / "set").begin == BEGIN


@pytest.mark.parametrize("template", ["<s> $A", None], ids=["--no-bos", "no template"])
def test_without_a_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str | None) -> None:
    """A tokenizer without a template, such as GPT-2's, gives the set that --no-bos gives."""
    folder, source, prefix = made(tmp_path / "bpe", template), corpus(tmp_path, "jsonl"), tmp_path / "set"
    words = ["data", "prepare", str(source), "--tokenizer", str(folder), "--output", str(prefix)]
    assert main([*words, *(["--no-bos"] if template else [])]) == 0
    assert "documents  4, 1 empty one left out\n" in capsys.readouterr().out
    reference = load_tokenizer(folder)
    assert documents(prefix) == [[*reference.encode(t, add_special_tokens=False).ids, END] for t in TEXTS if t]
    assert IndexedData(prefix).begin is None
    # Such a set has the record that all sets had before.
    checksums = read_checksums(prefix)
    assert checksums is not None
    assert len(checksums_path(prefix).read_bytes()) == 40 + 8 * len(checksums.blocks) + TAIL.size
    assert main([*words, "--overwrite"]) == 0
    assert (f", with the id {BEGIN} before each text\n" in capsys.readouterr().out) == bool(template)
    assert main(["data", "inspect", str(prefix), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["begin"] == (BEGIN if template else None)


@pytest.mark.parametrize("whole", [True, False], ids=["files of a folder", "a single file"])
def test_a_piece_that_continues_a_document_gets_no_begin(
    bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """Pieces are shorter than chunks, and both than documents."""
    monkeypatch.setattr("llmtrain_data.readers.CHUNK", 9000)
    monkeypatch.setattr("llmtrain_data.readers.WHOLE_FILE", 4096)
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b.txt")[: 1 + whole]:
        (tmp_path / "in" / name).write_text("hello world\n" * 3000)
    run(tmp_path / "in" if whole else tmp_path / "in/a.txt", bpe, tmp_path / "set")
    pieces = documents(tmp_path / "set")
    assert len(pieces) > 8 * (1 + whole)
    ids = [number for piece in pieces for number in piece]
    text = load_tokenizer(bpe).encode("hello world\n" * 3000).ids
    assert ids == [*text, END] * (1 + whole)


@pytest.mark.parametrize("long", [0, 10**9], ids=["one by one", "at once"])
@pytest.mark.parametrize("continues", [True, False])
def test_begins_and_ends_of_texts(long: int, continues: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document whose first text has no token begins with its next one."""
    monkeypatch.setattr(encode, "LONG", long)
    pieces, ends = [b"aa", b"", b"", b"b", b"c", b"d"], [True, True, False, False, True, True]
    chunk = TextChunk(pieces, np.array(ends), 9, continues)
    ids, lengths = np.array([3, 3, 4, 5, 6], np.uint32), np.array([2, 0, 0, 1, 1, 1])
    form = encode.DocumentFormat(BEGIN, END, np.dtype("uint16"))
    found = encode.assemble(chunk, chunk.texts(), ids, lengths, form)
    first = [] if continues else [BEGIN]
    assert found.ids.tolist() == [*first, 3, 3, END, BEGIN, 4, 5, END, BEGIN, 6, END]
    assert found.lengths.tolist() == [3 + len(first), 2, 2, 3]
    none = encode.assemble(TextChunk([], None, 0), [], np.empty(0, np.uint32), np.empty(0, np.int64), form)
    assert (len(none.ids), len(none.lengths)) == (0, 0)


@pytest.mark.parametrize(
    ("template", "begin"),
    [
        (None, None),
        ("$A", None),
        ("$A </s>", None),
        ("<s> $A", BEGIN),
        ("<s> $A </s>", BEGIN),
        ("<other> $A </s>", OTHER),
    ],
)
def test_the_template_says_what_begins_a_text(tmp_path: Path, template: str | None, begin: int | None) -> None:
    folder = made(tmp_path / "bpe", template)
    assert begin_of_text_id(folder, load_tokenizer(folder)) == begin


def test_other_kinds_of_templates(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(made(tmp_path / "bpe", None))
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", END), ("<s>", BEGIN))
    assert begin_of_text_id(tmp_path, tokenizer) == BEGIN
    # Where there is no template, no text is encoded: this vocabulary cannot encode every text.
    assert begin_of_text_id(tmp_path, Tokenizer(models.WordLevel({"a": 0}))) is None


@pytest.mark.parametrize(("template", "ids"), [("<other> <s> $A", "0, 2"), ("<x> $A", "999")])
def test_templates_that_cannot_be_followed_are_refused(tmp_path: Path, template: str, ids: str) -> None:
    folder, source = made(tmp_path / "bpe", template), corpus(tmp_path, "jsonl")
    with pytest.raises(DataError, match=f"puts the ids {ids} before a text; expected one id .* with --no-bos"):
        run(source, folder, tmp_path / "set")
    assert run(source, folder, tmp_path / "set", prepend_begin=False).documents == 4


@pytest.mark.parametrize("begin", [True, False])
def test_a_preparation_that_goes_on_after_another_one_is_of_one_kind(bpe: Path, tmp_path: Path, begin: bool) -> None:
    """A killed preparation leaves a `.bin` of the other kind and partial files. Nothing of them remains."""
    source, prefix = corpus(tmp_path, "jsonl"), tmp_path / "set"
    run(source, bpe, tmp_path / "expected", prepend_begin=begin)
    run(source, bpe, prefix, prepend_begin=not begin)
    (tmp_path / "set.idx").rename(tmp_path / "set.idx.partial")
    (tmp_path / "set.lengths.partial").write_bytes(b"xxxx")
    run(source, bpe, prefix, prepend_begin=begin)
    for suffix in (".bin", ".idx", ".checksums"):
        assert Path(f"{prefix}{suffix}").read_bytes() == (tmp_path / f"expected{suffix}").read_bytes()
    assert IndexedData(prefix).begin == (BEGIN if begin else None)


def test_damage_to_the_record_is_noticed(bpe: Path, tmp_path: Path) -> None:
    run(corpus(tmp_path, "jsonl"), bpe, tmp_path / "set")
    path = checksums_path(tmp_path / "set")
    whole = path.read_bytes()
    for place in range(len(whole) - TAIL_WITH_BEGIN.size, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DataError, match="does not match its own checksum"):
            read_checksums(tmp_path / "set")
    path.write_bytes(whole[:-8])
    with pytest.raises(DataError, match="does not match its own checksum"):
        read_checksums(tmp_path / "set")


def test_the_record_is_not_part_of_the_data_that_a_run_resumes_on(bpe: Path, tmp_path: Path) -> None:
    run(corpus(tmp_path, "jsonl"), bpe, tmp_path / "set")
    before = fingerprint(IndexedData(tmp_path / "set"))
    write_checksums(tmp_path / "set", overwrite=True)
    now = fingerprint(IndexedData(tmp_path / "set"))
    assert (before.begin, now.begin) == (BEGIN, None)
    assert difference([before], [now]) == ""


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids that models are given to continue."""
    found: list[list[int]] = []

    def generate(model: GPT, prompt: list[int], *rest: object) -> Iterator[int]:
        found.append(prompt)
        return iter(())

    monkeypatch.setattr(trained, "generate", generate)
    return found


def save(folder: Path, recipe: dict[str, Any], progress: dict[str, Any]) -> Path:
    """A checkpoint of a model with 65 ids."""
    ranks = Ranks(0, 0, Layout({Axis.DATA: 1}), torch.device("cpu"))
    shards = [StateShard(u, 0, u.numel, {"master": torch.zeros(u.numel)}) for u in model_units(CONFIG)]
    about = {"recipe": recipe, "model": asdict(CONFIG)}
    assert Checkpointer(folder / "checkpoints", ranks, 1, asynchronous=False).save(0, shards, progress, about) is None
    return folder


def sets(*begins: int | None) -> dict[str, Any]:
    given = [Fingerprint(path="set", bin_bytes=2, idx_bytes=1, index="0", sample="0", begin=begin) for begin in begins]
    return {"data": [asdict(one) for one in given]}


OLD = {"data": [{"path": "set", "bin_bytes": 2, "idx_bytes": 1, "index": "0", "sample": "0", "blocks": None}]}
RECIPE = {"data": {"path": "set"}}


@pytest.mark.parametrize(
    ("recipe", "progress", "before", "empty"),
    [
        (RECIPE, sets(BEGIN), [BEGIN], [BEGIN]),
        (RECIPE, sets(BEGIN, BEGIN), [BEGIN], [BEGIN]),
        (RECIPE, sets(None), [], [END]),
        (RECIPE, sets(BEGIN, None), [], [END]),
        (RECIPE, OLD, [], [END]),
        (RECIPE, {}, [], [END]),
        ({}, {"step": 0}, [BEGIN], [BEGIN]),
    ],
    ids=["begin", "blend", "no begin", "mixed blend", "no record", "no fingerprints", "imported"],
)
def test_a_prompt_begins_as_the_documents_do(
    tmp_path: Path,
    given: list[list[int]],
    recipe: dict[str, Any],
    progress: dict[str, Any],
    before: list[int],
    empty: list[int],
) -> None:
    tokenizer = words(tmp_path / "words")
    model = open_model(save(tmp_path, recipe, progress), print)
    for prompt in ("w7 w8", ""):
        assert "".join(complete(model, prompt, 1, Sampling(), tokenizer)) == prompt
    assert given == [[*before, 7, 8], empty]


def words(folder: Path, settings: str = '{"eos_token": "</s>"}') -> Path:
    """A tokenizer of words w3 to w64, with a template."""
    folder.mkdir()
    vocab = {"<other>": 0, "</s>": END, "<s>": BEGIN} | {f"w{number}": number for number in range(3, 65)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<other>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>", "<s>"])
    special = [("<s>", BEGIN), ("</s>", END)]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A $B </s>", special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(settings)
    return folder


@pytest.mark.parametrize("begin", [-1, 65, 2**63])
def test_a_begin_that_no_model_has_is_refused(tmp_path: Path, begin: int) -> None:
    model = open_model(save(tmp_path, RECIPE, sets(begin)), print)
    with pytest.raises(BadInputError, match=f"token {begin} of the prompt"):
        next(complete(model, "w7", 1, Sampling(), words(tmp_path / "words")))


def test_fingerprints_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    model = open_model(save(tmp_path, RECIPE, {"data": [{"begin": 1}]}), print)
    with pytest.raises(BadInputError, match="fingerprints of the data that cannot be read: Field required; give"):
        next(complete(model, "w7", 1, Sampling(), words(tmp_path / "words")))


def test_the_end_of_text_of_a_tokenizer_that_names_none(tmp_path: Path, given: list[list[int]]) -> None:
    """As in preparation, it is `<|endoftext|>`."""
    folder = words(tmp_path / "words", "{}")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"</s>"', '"<|endoftext|>"'))
    list(complete(open_model(save(tmp_path, RECIPE, {}), print), "", 1, Sampling(), folder))
    assert given == [[END]]


def test_the_tokenizer_is_that_of_the_preparation(tmp_path: Path, given: list[list[int]]) -> None:
    """transformers builds GPT2Tokenizer anew from the vocabulary and the merges, with GPT-2's own splits."""
    folder = made(tmp_path / "bytewise", None)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_str(path.read_text())
    single, bytewise = pre_tokenizers.Split("l", "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([single, bytewise])
    tokenizer.save(str(path))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "hello world"}) + "\n")
    run(tmp_path / "in.jsonl", folder, tmp_path / "set", prepend_begin=False)
    (document,) = documents(tmp_path / "set")
    model = replace(open_model(save(tmp_path, RECIPE, sets(None)), print), tokenizer=folder)
    model.model.config = replace(model.model.config, vocab=300)
    list(complete(model, "hello world", 1, Sampling(), None))
    assert [[*ids, END] for ids in given] == [document]


@pytest.mark.parametrize(
    ("prompt", "shown"), [("w7", "w7 w8 w9"), ("w7 " * 20 + "w7", "w7 " * 20 + "w7 w8 w9"), ("", "w8 w9")]
)
def test_the_space_between_the_prompt_and_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: str, shown: str
) -> None:
    """Decoders of tokens that begin with a space, such as Llama 2's, leave it out before the first one."""
    monkeypatch.setattr(trained, "generate", lambda *rest: iter((8, 9)))
    folder = words(tmp_path / "words")
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_str(path.read_text().replace('"w', '"\u2581w'))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.save(str(path))
    model = open_model(save(tmp_path, RECIPE, sets(BEGIN)), print)
    assert "".join(complete(model, prompt, 2, Sampling(), folder)) == shown


TINY = """
model: {{family: gpt2, layers: 1, hidden: 16, heads: 2}}
data: {{path: {folder}/set, tokenizer: {folder}/bpe, sequence_length: 16}}
train: {{steps: 1, global_batch: 2, microbatch: 2, eval_every: 0}}
optimizer: {{warmup: 0}}
logging: {{dir: {folder}/runs}}
"""


@pytest.mark.parametrize("begin", [True, False])
def test_a_run_hands_on_what_begins_its_documents(
    bpe: Path, tmp_path: Path, given: list[list[int]], begin: bool
) -> None:
    """The set is gone when the model generates."""
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "hello world " * 20}) + "\n")
    run(tmp_path / "in.jsonl", bpe, tmp_path / "set", prepend_begin=begin)
    (document,) = documents(tmp_path / "set")
    (tmp_path / "tiny.yaml").write_text(TINY.format(folder=tmp_path))
    train_here(tmp_path / "tiny.yaml")
    for suffix in (".bin", ".idx", ".checksums"):
        (tmp_path / f"set{suffix}").unlink()
    model = open_model(tmp_path / "runs" / "tiny", print)
    list(complete(model, "hello world " * 20, 1, Sampling(), None))
    list(complete(model, "", 1, Sampling(), None))
    assert given == [document[:-1], [BEGIN if begin else END]]


def test_a_blend_of_both_kinds_is_told(bpe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "hello world " * 20}) + "\n")
    for name, begin in (("set", True), ("same", True), ("other", False)):
        run(tmp_path / "in.jsonl", bpe, tmp_path / name, prepend_begin=begin)
    (tmp_path / "tiny.yaml").write_text(TINY.format(folder=tmp_path))
    for name, count in (("same", 0), ("other", 1)):
        train_here(tmp_path / "tiny.yaml", f"name={name}", f"data.path=[1,{tmp_path}/set,1,{tmp_path}/{name}]")
        shown = " ".join("".join(capsys.readouterr()).split())
        assert (
            shown.count(f"{tmp_path}/set and {tmp_path}/{name} do not begin their documents with the same id") == count
        )
