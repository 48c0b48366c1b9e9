"""Prepares a corpus as a `.bin/.idx` pair: reads, encodes and writes concurrently, in constant memory."""

import gc
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain_data import units
from llmtrain_data.checksums import Encoding
from llmtrain_data.corpus import Corpus, no_text
from llmtrain_data.encode import ENCODERS, STOPS, DocumentFormat, Encoded, Encoder, choose_encoder
from llmtrain_data.errors import DataError, PreparationStoppedError
from llmtrain_data.indexed import IndexedWriter, bin_path, idx_path, partial_paths, token_dtype
from llmtrain_data.output import Terminal
from llmtrain_data.progress import Report, progress
from llmtrain_data.ragged import ragged_batches
from llmtrain_data.tokenizer import (
    begin_of_text_id,
    end_of_text_id,
    load_tokenizer,
    tokenizer_identity,
    tokenizer_size,
)
from llmtrain_data.waiting import Waiting


@dataclass(frozen=True)
class PrepareOptions:
    """Options of a preparation.

    prepend_begin: begin documents with the beginning-of-text id, if the tokenizer's template begins texts with it.
    append_end: end documents with the end-of-text id. overwrite: replace an existing set. encoder: one of ENCODERS.
    workers: cores to use (None: all).
    """

    prepend_begin: bool = True
    append_end: bool = True
    overwrite: bool = False
    encoder: str = "auto"
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.encoder not in ENCODERS:
            raise DataError(f"--encoder is {self.encoder!r}; expected one of {', '.join(ENCODERS)}")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The result of a preparation. tokens: with those that begin and end documents. text_bytes: UTF-8 bytes of text.
    left_out: skipped documents without any token. begin: as in `Encoding`. encoder, reason: as in `Encoder`."""

    documents: int
    tokens: int
    text_bytes: int
    left_out: int
    begin: int | None
    dtype: str
    encoder: str
    reason: str
    seconds: float

    def lines(self, prefix: Path) -> list[str]:
        """Return the lines for the command line."""
        rate = units.rate(self.text_bytes / max(self.seconds, 1e-9))
        left_out = f", {units.count(self.left_out, 'empty one')} left out" if self.left_out else ""
        begin = "" if self.begin is None else f", with the id {self.begin} before each text"
        return [
            f"encoder    {self.encoder} ({self.reason})",
            f"documents  {self.documents}{left_out}{begin}",
            f"tokens     {self.tokens} as {self.dtype}, of {self.text_bytes / max(self.tokens, 1):.2f} bytes",
            f"wrote      {bin_path(prefix)} and {idx_path(prefix)} in {units.duration(self.seconds)} ({rate})",
        ]


def prepare(corpus: Corpus, tokenizer: Path, prefix: Path, options: PrepareOptions) -> Prepared:
    """Encode `corpus` with the tokenizer in folder `tokenizer`; write `prefix.bin` and `prefix.idx`.

    The files get these names only when they are complete. Raises DataError for a bad corpus, tokenizer or output, and
    PreparationStoppedError on SIGINT or SIGTERM; in both cases no files remain.
    """
    started = time.monotonic()
    # Modules and tokenizers live until exit. Without freeze, garbage collection over them takes some 0.05 s.
    gc.freeze()
    with _busy("loading the tokenizer"):
        size = tokenizer_size(tokenizer)
        reference = load_tokenizer(tokenizer)
        begin = begin_of_text_id(tokenizer, reference) if options.prepend_begin else None
        encoding = Encoding(tokenizer_identity(tokenizer), begin)
        end = end_of_text_id(tokenizer, reference) if options.append_end else None
    check_output(prefix, options.overwrite)
    with interruptible(prefix), ragged_batches():
        with _busy("choosing the encoder"):
            chunks = corpus.chunks()
            first = next(chunks, None)
            if first is None:
                raise no_text(corpus)
            encoder = choose_encoder(tokenizer, reference, first.texts(), options.encoder, options.workers)
        dtype = token_dtype(size)
        gc.freeze()
        with _writing(prefix, dtype, encoding) as writer, progress("prepare", corpus.total, corpus.unit) as report:
            stream = encoder.stream(chain([first], chunks), DocumentFormat(begin, end, dtype))
            counts = _write(writer, stream, report)
            if writer.documents == 0:
                raise no_text(corpus)
            writer.commit()
    seconds = time.monotonic() - started
    return _summary(writer, counts, begin, encoder, seconds)


def _busy(what: str) -> Waiting:
    return Waiting(lambda: what, Terminal(stderr=True))


def check_output(prefix: Path, overwrite: bool) -> None:
    """Raise DataError if a data set cannot be written at `prefix`."""
    if prefix.is_dir() or str(prefix).endswith((".bin", ".idx")):
        raise DataError(f"--output {prefix} is not a prefix; expected a path without .bin, such as {prefix}/text")
    existing = [path for path in (bin_path(prefix), idx_path(prefix)) if path.exists()]
    # A kill between the renames leaves a .bin without .idx, beside partial files.
    unfinished = len(existing) == 1 and existing[0].suffix == ".bin" and partial_paths(prefix)[2].exists()
    if existing and not overwrite and not unfinished:
        names = " and ".join(str(path) for path in existing)
        exist, them = ("exists", "it") if len(existing) == 1 else ("exist", "them")
        raise DataError(f"{names} already {exist}; give another --output, or --overwrite to replace {them}")


@contextmanager
def _writing(prefix: Path, dtype: np.dtype[Any], encoding: Encoding) -> Iterator[IndexedWriter]:
    """Yield a writer; discard its files if it is not committed."""
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            # From the first file on, a signal must not prevent that they are removed.
            with _stops_deferred():
                writer = IndexedWriter(prefix, dtype, encoding)
                stack.callback(writer.discard)
            yield writer
    except OSError as error:
        raise DataError(f"{prefix} cannot be written: {error.strerror or error}") from error


@contextmanager
def _stops_deferred() -> Iterator[None]:
    """In the main thread, act on SIGINT and SIGTERM at the end of the block. To block them there would not hold them
    back: another thread takes them, and the main thread still runs their handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


@contextmanager
def interruptible(prefix: Path) -> Iterator[None]:
    """In the main thread, turn SIGINT and SIGTERM into an error that says how to continue."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in STOPS}
    try:
        yield
    except KeyboardInterrupt as stopped:
        raise PreparationStoppedError(
            f"stopped by {stopped}: {prefix}.bin and {prefix}.idx were not written; "
            "run the same command again to start over",
            str(stopped) == signal.SIGINT.name,
        ) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write(writer: IndexedWriter, stream: Iterator[Encoded], report: Report) -> tuple[int, int]:
    """Write all chunks. Return the bytes of text and the number of skipped documents without any token."""
    text_bytes = left_out = 0
    for encoded in stream:
        writer.add(encoded.ids, encoded.lengths)
        text_bytes += encoded.text_bytes
        left_out += encoded.empty
        report(encoded.done)
    return text_bytes, left_out


def _summary(
    writer: IndexedWriter, counts: tuple[int, int], begin: int | None, encoder: Encoder, seconds: float
) -> Prepared:
    return Prepared(
        documents=writer.documents,
        tokens=writer.token_count,
        text_bytes=counts[0],
        left_out=counts[1],
        begin=begin,
        dtype=writer.dtype.name,
        encoder=encoder.name,
        reason=encoder.reason,
        seconds=seconds,
    )
