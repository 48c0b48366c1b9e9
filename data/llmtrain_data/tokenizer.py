"""Tokenizer folders in Hugging Face's layout: loading them for data preparation, and training a new one."""

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import xxhash

from llmtrain_data.bounds import MAX_IDS
from llmtrain_data.errors import DataError
from llmtrain_data.untrusted import UnreadableError, read_bytes, read_json, reason

if TYPE_CHECKING:
    import tokenizers

    from llmtrain_data.corpus import Corpus

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCAB = 257
"""256 bytes and the end of text."""

_TRAINED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
"""Files of a tokenizer that `llmtrain data tokenizer` may replace."""

LARGEST_TOKENIZER = 128 << 20
"""Most bytes of a tokenizer.json. One with 256,000 ids has 35 MB."""

SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
"""Configuration files of a tokenizer folder."""


_TOKENIZER_NAMES = ("tokenizer", "vocab", ".model", ".spm", ".tiktoken")
"""Each tokenizer of transformers has a file whose name contains one of these."""


class _Model(msgspec.Struct):
    """vocab: token to id, or a list for Unigram models."""

    vocab: dict[str, int] | list[Any]


class AddedToken(msgspec.Struct):
    """A token that a tokenizer adds to its model's vocabulary."""

    id: int
    content: str = ""


class _Additions(msgspec.Struct):
    added_tokens: list[AddedToken] | None = None


class _Description(_Additions, kw_only=True):
    """The part of a `tokenizer.json` that determines its size."""

    model: _Model


class _MergingModel(msgspec.Struct):
    """vocab: token to id, or tokens with scores. merges: pairs of tokens, in order; a pair may also be written as one
    text with a space between them."""

    vocab: dict[str, int] | list[tuple[str, float]]
    merges: list[str | tuple[str, str]] | None = None


class _Mapping(_Additions, kw_only=True):
    """The part of a `tokenizer.json` that identifies it."""

    model: _MergingModel


class _Tokens(_Additions, kw_only=True):
    """The part of a `tokenizer.json` that names its tokens."""

    model: _MergingModel | None = None


FilePart = TypeVar("FilePart", _Description, _Mapping, _Tokens)


def tokenizer_size(folder: str | Path) -> int:
    """Return the vocabulary size of a tokenizer, including added tokens: its largest id plus 1.

    Reads `tokenizer.json`; transformers opens a folder without one. Raises DataError if that fails, if an id is out of
    range, or if one of the SETTINGS cannot be read.
    """
    vocab: dict[str, int] | list[Any]
    _check_settings(Path(folder))
    if (Path(folder) / "tokenizer.json").exists():
        description = _decoded(Path(folder), _Description)
        vocab, added = description.model.vocab, description.added_tokens or []
    else:
        vocab, added = hf_tokenizer(folder).get_vocab(), []
    if not vocab:
        raise DataError(f"the tokenizer in {folder} has an empty vocabulary; expected a Hugging Face tokenizer")
    ids = [*(vocab.values() if isinstance(vocab, dict) else range(len(vocab))), *(token.id for token in added)]
    # Encoders allocate a table of all ids, and prepared sets store ids in at most 4 bytes.
    if min(ids) < 0 or max(ids) >= MAX_IDS:
        raise DataError(
            f"the tokenizer in {folder} has ids from {min(ids)} to {max(ids)}; expected 0 to {MAX_IDS - 1}; "
            "use another tokenizer"
        )
    return max(ids) + 1


def tokenizer_identity(folder: str | Path) -> int:
    """Return a 64-bit digest of a tokenizer's vocabulary, with added tokens, and merges.

    It does not depend on the layout of the files, nor on whether a token of the vocabulary is also listed as added.
    Raises DataError for a folder without a tokenizer.
    """
    if (Path(folder) / "tokenizer.json").exists():
        mapping = _decoded(Path(folder), _Mapping)
    else:
        mapping = msgspec.json.decode(load_tokenizer(folder).to_str(), type=_Mapping)
    vocab = mapping.model.vocab
    added = {token.content: token.id for token in mapping.added_tokens or []}
    # json writes a score in the same way in all versions; msgspec is five times as fast for the rest.
    ids, pieces = ({**vocab, **added}, "") if isinstance(vocab, dict) else (added, json.dumps(vocab))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in mapping.model.merges or []]
    return xxhash.xxh3_64_intdigest(msgspec.json.encode([ids, pieces, merges], order="sorted"))


def token_ids(folder: Path) -> dict[str, int]:
    """Return the id of each token of the folder's tokenizer; empty if it holds none. Raises DataError."""
    if not (folder / "tokenizer.json").exists():
        # An imported model's folder may hold nothing but a generation_config.json.
        with suppress(DataError):
            return dict(hf_tokenizer(folder).get_vocab())
        return {}
    found = _decoded(folder, _Tokens)
    vocab = {} if found.model is None else found.model.vocab
    ids = vocab if isinstance(vocab, dict) else {token: number for number, (token, _) in enumerate(vocab)}
    return ids | {token.content: token.id for token in found.added_tokens or []}


def _decoded(folder: Path, part: type[FilePart]) -> FilePart:
    path = folder / "tokenizer.json"
    try:
        # The type skips the list of merges, which would take ten times as long to build.
        return msgspec.json.decode(read_bytes(path, LARGEST_TOKENIZER), type=part)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} has no vocabulary ({reason(error)}); expected a Hugging Face tokenizer") from error


def load_tokenizer(folder: str | Path) -> "tokenizers.Tokenizer":
    """Return the folder's tokenizer, with truncation and padding switched off.

    Raises DataError for a folder without a tokenizer.
    """
    import tokenizers

    path = Path(folder) / "tokenizer.json"
    if path.exists():
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(read_bytes(path, LARGEST_TOKENIZER))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # tokenizers raises Exception, and its Rust panics are BaseException
            raise DataError(f"{path} is not a tokenizer: {reason(error)}") from error
    else:
        tokenizer = tokenizers.Tokenizer.from_str(hf_tokenizer(folder).backend_tokenizer.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def hf_tokenizer(folder: str | Path) -> Any:
    """Return the transformers tokenizer of a folder. It may lack a tokenizer.json, and have a SentencePiece model.

    Raises DataError for a folder without a tokenizer.
    """
    if not Path(folder).is_dir():
        raise DataError(
            f"no tokenizer folder {folder}; expected one with tokenizer.json, as `llmtrain data tokenizer` writes"
        )
    # transformers would wait forever if it opened a named pipe.
    for path in Path(folder).iterdir():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise DataError(f"{path} is not a regular file; expected a folder of a Hugging Face tokenizer")
    _check_settings(Path(folder))
    # Importing transformers takes seconds, so first see whether there is anything to open.
    names = [path.name for path in Path(folder).iterdir()]
    if not any(part in name for name in names for part in _TOKENIZER_NAMES):
        raise DataError(f"{folder} holds no usable Hugging Face tokenizer: it has no tokenizer.json and no vocabulary")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        tokenizer.backend_tokenizer  # noqa: B018
    except Exception as error:  # the type of transformers' exception depends on the invalid file
        why = _renaming(names) or reason(error)
        raise DataError(f"{folder} holds no usable Hugging Face tokenizer: {why}") from error
    return tokenizer


def _renaming(names: list[str]) -> str | None:
    """Return how a folder of GPT-NeoX's or Megatron's own files becomes a Hugging Face tokenizer; None for others."""
    whole, vocab, merges = (
        next((name for name in sorted(names) if name.endswith(ending)), None)
        for ending in ("tokenizer.json", "vocab.json", "merges.txt")
    )
    if whole is not None:
        return f"rename {whole} to tokenizer.json"
    if vocab is None or merges is None or "tokenizer_config.json" in names:
        return None
    steps = [f"rename {old} to {new}" for old, new in {vocab: "vocab.json", merges: "merges.txt"}.items() if old != new]
    return ", ".join([*steps, 'write {"tokenizer_class": "GPT2Tokenizer"} to tokenizer_config.json'])


def end_of_text_id(folder: str | Path, tokenizer: "tokenizers.Tokenizer") -> int:
    """Return the id that ends a document: that of the configured eos token, else of `<|endoftext|>`.

    Raises DataError if the vocabulary lacks it.
    """
    number = known_end_of_text_id(folder, tokenizer)
    if number is None:
        token = configured_token(Path(folder), "eos_token") or END_OF_TEXT
        raise DataError(
            f"the tokenizer in {folder} has no end-of-text token ({token!r} is not in its vocabulary); "
            "set eos_token in its tokenizer_config.json, or prepare documents without an end token with --no-eod"
        )
    return number


def known_end_of_text_id(folder: str | Path, tokenizer: "tokenizers.Tokenizer") -> int | None:
    """Return the id of the configured eos token, else of `<|endoftext|>`; None if the vocabulary lacks it.

    Raises DataError if the configuration cannot be read.
    """
    token = configured_token(Path(folder), "eos_token") or END_OF_TEXT
    try:
        number = tokenizer.token_to_id(token)
    except UnicodeEncodeError:  # JSON may hold lone surrogates, which no vocabulary has
        return None
    return None if number is None else int(number)


def begin_of_text_id(folder: str | Path, tokenizer: "tokenizers.Tokenizer") -> int | None:
    """Return the id that the tokenizer's template puts before a text, None if it puts none there.

    Raises DataError if it puts several there, or an id that is not in the vocabulary.
    """
    before = ids_before_text(tokenizer)
    if before and (len(before) > 1 or tokenizer.id_to_token(before[0]) is None):
        raise DataError(
            f"the tokenizer in {folder} puts the ids {', '.join(map(str, before))} before a text; expected one id of "
            "its vocabulary; prepare documents without it with --no-bos"
        )
    return before[0] if before else None


def ids_before_text(tokenizer: "tokenizers.Tokenizer") -> list[int]:
    """Return the ids that the tokenizer's template puts before a text. It may put others after it."""
    template = tokenizer.encode("").ids
    if not template:
        return []
    # A text shows which of these ids come before it. The template's own token always has an id.
    encoding = tokenizer.encode(tokenizer.id_to_token(template[0]) or "")
    pairs = zip(encoding.ids, encoding.sequence_ids, strict=True)
    return [number for number, _ in takewhile(lambda pair: pair[1] is None, pairs)]


def train_tokenizer(texts: Iterator[list[str]], vocab_size: int, output: Path, overwrite: bool = False) -> int:
    """Train a byte-level BPE tokenizer, as GPT-2 uses, and write its folder. Return its vocabulary size.

    The folder holds `tokenizer.json` and `tokenizer_config.json`; bos, eos, pad and unk are `<|endoftext|>`. It gets
    its name only when it is complete. Raises DataError for a size below 257, and for an output that already exists.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    from llmtrain_data.output import Terminal
    from llmtrain_data.waiting import Waiting

    check_new_tokenizer(vocab_size, output, overwrite)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The library counts words while it reads the texts. Then it merges, without a report of its progress.
    merging = Waiting(lambda: f"merging words into {vocab_size} ids", Terminal(stderr=True))

    def texts_then_merging() -> Iterator[list[str]]:
        yield from texts
        merging.start()

    try:
        tokenizer.train_from_iterator(texts_then_merging(), trainer)
    finally:
        merging.stop()
    config = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), END_OF_TEXT)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    aside = _empty_beside(output)
    tokenizer.save(str(aside / "tokenizer.json"))
    (aside / "tokenizer_config.json").write_text(json.dumps({**config, **settings}, indent=2) + "\n")
    if overwrite:
        shutil.rmtree(output, ignore_errors=True)
    aside.rename(output)
    return int(tokenizer.get_vocab_size())


def sampled_texts(corpus: "Corpus", limit: int) -> Iterator[list[str]]:
    """Yield the texts of a corpus up to `limit` characters, and show progress. Raises DataError if there is no text."""
    from llmtrain_data.corpus import no_text
    from llmtrain_data.progress import progress

    total = corpus.total
    taken = 0
    with progress("read, count words", total, corpus.unit) as report:
        for chunk in corpus.chunks():
            texts = chunk.texts()
            yield texts
            report(chunk.done)
            taken += sum(map(len, texts))
            if taken >= limit:
                return
    if not taken:
        raise no_text(corpus)


def check_new_tokenizer(vocab_size: int, output: Path, overwrite: bool) -> None:
    """Raise DataError if a tokenizer of this size cannot be written to `output`."""
    if vocab_size < SMALLEST_VOCAB:
        raise DataError(
            f"--vocab-size is {vocab_size}; a byte-level BPE needs at least {SMALLEST_VOCAB}, "
            "the 256 bytes and the end of text"
        )
    if vocab_size > MAX_IDS:
        raise DataError(f"--vocab-size is {vocab_size}; expected at most {MAX_IDS:,}")
    # The current directory cannot be replaced.
    here = output.exists() and output.samefile(Path.cwd())
    empty = output.is_dir() and not any(output.iterdir()) and not here
    if output.exists() and not empty and (here or not (overwrite and (output / "tokenizer.json").is_file())):
        raise DataError(f"--output {output} already exists; give another folder, or --overwrite to replace a tokenizer")
    if output.exists() and (others := sorted({path.name for path in output.iterdir()} - set(_TRAINED))):
        raise DataError(
            f"--output {output} holds more than a tokenizer, such as {others[0]}, which --overwrite would delete; give "
            "another folder"
        )
    _empty_beside(output).rmdir()


def _empty_beside(output: Path) -> Path:
    """Return an empty folder that can be renamed to `output`. Raises DataError if it cannot be made."""
    aside = output.with_name(output.name + ".partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"--output {output} cannot be written: {error.strerror or error}") from error
    return aside


def configured_token(folder: Path, kind: str) -> str | None:
    """Return a special token of the folder's configuration, None if it has none. kind: such as `eos_token`. Raises
    DataError."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = tokenizer_settings(folder, name).get(kind)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None


def _check_settings(folder: Path) -> None:
    """Raise DataError if one of the SETTINGS cannot be read, so that a run fails before it trains."""
    for name in SETTINGS:
        tokenizer_settings(folder, name)


def tokenizer_settings(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of one of the SETTINGS; empty if the file does not exist. Raises DataError."""
    path = folder / name
    if not path.exists():
        return {}
    try:
        content = read_json(path)
    except UnreadableError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}; expected a JSON object")
    return content
