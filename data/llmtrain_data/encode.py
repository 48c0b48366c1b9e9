"""Encoders: gigatoken if it gives the same ids as `tokenizers`, else `tokenizers`. Both use every core."""

import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from llmtrain_data.errors import DataError
from llmtrain_data.readers import Chunk
from llmtrain_data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

    import tokenizers

ENCODERS = ("auto", "gigatoken", "tokenizers")
CACHE = 128 << 20
"""Bytes per core that gigatoken's word cache may add to the process before it is emptied."""

REFILL = 16
"""Chunks per core between two checks of the cache's size. An emptied cache takes time to fill again."""

SAMPLE_TEXTS, SAMPLE_CHARACTERS = 64, 2048
"""Number of sample texts, and characters of each. Both encoders must give the same ids for them before the first
chunk."""

WATCHED = 64
"""In one of this many chunks, both encoders encode one text, and the ids are compared."""

LONG = 500
"""From this mean number of ids per text, texts are copied one by one."""

Texts = list[str] | list[bytes]
"""Strings, or their UTF-8."""

STOPS = (signal.SIGINT, signal.SIGTERM)

SPECIMENS = (
    " a  b\t\tc\n\n  d\r\n\u00a0\u3000e ",
    "don't WE'LL 12345678 3.14e-10 x_1 #!/$%^&*()",
    "Gr\u00fc\u00dfe, \u0645\u0631\u062d\u0628\u0627, \u4f60\u597d, e\u0301, \u212b",
    "\U0001f469\u200d\U0001f680 \ufb01\u200b",
    "\x00\x01\x7f\ufffd <|endoftext|> <s></s> [UNK]",
)
"""Texts for which tokenizers often differ: white space, digits, contractions, other scripts, special tokens."""


@dataclass(frozen=True)
class DocumentFormat:
    """How documents are stored. begin, end: ids that begin and end each document, None for none. dtype: of the ids."""

    begin: int | None
    end: int | None
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Encoded:
    """One encoded chunk. ids: the concatenated ids of its texts, with begin and end tokens. lengths: number per text.

    text_bytes: UTF-8 bytes of text. empty: number of texts without a token, which are skipped. done: as in `Chunk`.
    """

    ids: np.ndarray
    lengths: np.ndarray
    text_bytes: int
    empty: int
    done: int


class Encoder(Protocol):
    """Encodes chunks of text to ids, in order. name: the library. reason: why `choose_encoder` chose it."""

    name: str
    reason: str

    def stream(self, chunks: Iterator[Chunk], form: DocumentFormat) -> Iterator[Encoded]:
        """Encode the chunks."""


class Gigatoken:
    """Gigatoken on all cores. `tokenizers` encodes some of the texts as well, as a check.

    This class uses its own threads, not gigatoken's: parsing and storing also run on all cores, and a chunk stays in
    one core's cache. Each thread has its own tokenizer, because a tokenizer serves one thread at a time.
    """

    name = "gigatoken"

    def __init__(self, description: str, reference: "tokenizers.Tokenizer", reason: str, cores: int) -> None:
        self.reason = reason
        self._description = description
        self._reference = reference
        self._cores = cores
        self._line = line_without_space(reference)
        self.tokenizer = self.load()

    def stream(self, chunks: Iterator[Chunk], form: DocumentFormat) -> Iterator[Encoded]:
        """Encode the chunks. Raises DataError if the two encoders differ."""
        tokenizers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        tokenizers.put((0, self.tokenizer))
        for _ in range(1, self._cores):
            tokenizers.put((-1, None))  # its thread loads it, in parallel to the first one's work
        limit = _resident() + CACHE * self._cores
        generation = since = 0

        def work(chunk: Chunk, watched: bool) -> Encoded:
            made, tokenizer = tokenizers.get()
            try:
                if made < generation:
                    made, tokenizer = generation, self.load()
                texts = chunk.encodable()
                ids, lengths = encode_pieces(partial(encode_with, tokenizer), chunk, texts, self._line)
                if watched:
                    self._watch(tokenizer, texts)
                return assemble(chunk, texts, ids, lengths, form)
            finally:
                tokenizers.put((made, tokenizer))

        pool = ThreadPoolExecutor(self._cores)
        try:
            watched = (number % WATCHED == 0 for number in count())
            for encoded in in_order(lambda chunk: pool.submit(work, chunk, next(watched)), chunks, self._cores):
                yield encoded
                since += 1
                if since > REFILL * self._cores:
                    since = 0
                    generation += _resident() > limit
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def load(self) -> Any:
        """Return a new tokenizer, with an empty cache."""
        import gigatoken

        return gigatoken.Tokenizer.from_json(self._description)

    def _watch(self, tokenizer: Any, texts: Texts) -> None:
        text = _sampled(texts, 1)[0] if texts else ""
        if encode_with(tokenizer, [text])[0].tolist() != _reference_ids(self._reference, [text])[0]:
            raise DataError(f"gigatoken and tokenizers encode {text[:40]!r} differently; use --encoder tokenizers")


class Workers:
    """`tokenizers` in one process per core."""

    name = "tokenizers"

    def __init__(self, folder: Path, reason: str, cores: int) -> None:
        self.reason = reason
        self._folder = folder
        self._cores = cores

    def stream(self, chunks: Iterator[Chunk], form: DocumentFormat) -> Iterator[Encoded]:
        """Encode the chunks."""
        # Importing these takes 0.02 s, and gigatoken does not need them.
        import multiprocessing
        from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor

        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(self._cores, context, _start_worker, (str(self._folder), form))
        try:
            yield from in_order(lambda chunk: _submit(pool, chunk), chunks, self._cores)
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process that encodes text died; if memory ran out, use fewer --workers"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: "ProcessPoolExecutor", chunk: Chunk) -> Future[Encoded]:
    """Submit a chunk. Block signals meanwhile: they must not interrupt the start of a worker process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        return pool.submit(_work, chunk)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def in_order(submit: Callable[[Chunk], Future[Encoded]], chunks: Iterator[Chunk], workers: int) -> Iterator[Encoded]:
    """Yield the results in the order of the chunks, with enough chunks in flight to keep all workers busy."""
    waiting: deque[Future[Encoded]] = deque()
    for chunk in chunks:
        waiting.append(submit(chunk))
        if len(waiting) > 2 * workers:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def encode_with(tokenizer: Any, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
    """Encode texts with a gigatoken tokenizer in this thread, within `ragged_batches`.

    Returns the concatenated ids (uint32) and the number of ids per text (int64).
    """
    if not texts:
        return np.empty(0, np.uint32), np.empty(0, np.int64)
    ids, lengths = tokenizer.encode_batch(texts, parallel=False)
    return ids, lengths


def assemble(chunk: Chunk, texts: Texts, ids: np.ndarray, lengths: np.ndarray, form: DocumentFormat) -> Encoded:
    """Put the begin token before each document and the end token after it, and skip texts without a token, as Megatron
    does.

    A text that continues its document gets no begin token, and one that does not end its document no end token.
    """
    begins, ends = _begins_and_ends(chunk, len(lengths))
    kept = lengths > 0
    empty = len(lengths) - int(kept.sum())
    if empty:
        # The first text with a token begins its document, and the last one ends it.
        numbers = np.cumsum(begins)
        ended, numbers = numbers[ends], numbers[kept]
        begins = np.diff(numbers, prepend=0) > 0
        ends = (np.diff(numbers, append=-1) != 0) & np.isin(numbers, ended)
        lengths = lengths[kept]
    before, after = begins & (form.begin is not None), ends & (form.end is not None)
    ids, lengths = _with_marks(ids, lengths, before, after, form), lengths + before + after
    return Encoded(ids, lengths, _text_bytes(texts), empty, chunk.done)


def _begins_and_ends(chunk: Chunk, texts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which of the texts of a chunk begin a document, and which end one."""
    ends = np.ones(texts, bool) if chunk.ends is None else chunk.ends
    return np.append(not chunk.continues, ends)[:-1], ends


def line_without_space(tokenizer: "tokenizers.Tokenizer") -> list[int] | None:
    """Return the ids of a line end if a word after one has others than at the beginning of a text, where the tokenizer
    puts a space (as Llama 2's does); None if they are the same."""
    line, word, both = _reference_ids(tokenizer, ["\n", "a", "\na"])
    return line if line and both[: len(line)] == line and both[len(line) :] != word else None


def encode_pieces(
    encode: Callable[[Texts], tuple[np.ndarray, np.ndarray]], chunk: Chunk, texts: Texts, line: list[int] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Encode the texts of a chunk, of which some continue a document after a line end: with that line end before them,
    whose ids are then left out. line: see `line_without_space`. Returns what `encode` does."""
    begins, _ = _begins_and_ends(chunk, len(texts))
    if line is None or begins.all():
        return encode(texts)
    before: Any = b"\n" if isinstance(texts[0], bytes) else "\n"
    given: list[Any] = [text if begin else before + text for text, begin in zip(texts, begins, strict=True)]
    ids, lengths = encode(given)
    rows = np.split(ids, np.cumsum(lengths)[:-1])
    for index in np.flatnonzero(~begins):
        if rows[index][: len(line)].tolist() == line:
            rows[index] = rows[index][len(line) :]
        else:
            # The line end is one token with what follows.
            alone: list[Any] = [texts[index]]
            rows[index], _ = encode(alone)
    return np.concatenate(rows), np.array([len(row) for row in rows], np.int64)


def _with_marks(
    ids: np.ndarray, lengths: np.ndarray, before: np.ndarray, after: np.ndarray, form: DocumentFormat
) -> np.ndarray:
    """Return the ids in the dtype of `form`, with the begin and the end token where texts have `before` and `after`."""
    stops = np.cumsum(lengths + before + after)
    starts = stops - after - lengths
    out = np.empty(len(ids) + int(before.sum() + after.sum()), form.dtype)
    first, last = starts[before] - 1, stops[after] - 1
    if len(ids) < LONG * len(lengths):
        is_text = np.ones(len(out), bool)
        is_text[first] = is_text[last] = False
        out[is_text] = ids
    else:
        # For long texts, copying them one by one takes a third of the time.
        source = 0
        for length, target in zip(lengths.tolist(), starts.tolist(), strict=True):
            out[target : target + length] = ids[source : source + length]
            source += length
    out[first], out[last] = form.begin or 0, form.end or 0
    return out


def choose_encoder(
    folder: Path, reference: "tokenizers.Tokenizer", sample: list[str], wanted: str, workers: int | None
) -> Encoder:
    """Return the encoder for the tokenizer in `folder`. reference: the loaded tokenizer. workers: cores (None: all).

    Returns gigatoken if it supports the tokenizer and gives the same ids as `tokenizers` for texts of `sample` and for
    SPECIMENS. Raises DataError if `wanted` is gigatoken and it cannot be used.
    """
    cores = workers or len(os.sched_getaffinity(0))
    if wanted == "tokenizers":
        return Workers(folder, "requested", cores)
    texts = [*SPECIMENS, *_sampled(sample, SAMPLE_TEXTS)]
    # Such a token is none within a longer word. gigatoken takes it there too, which few texts show.
    words = [token.content for token in reference.get_added_tokens_decoder().values() if token.single_word]
    try:
        encoder = Gigatoken(reference.to_str(), reference, f"same ids as tokenizers on {len(texts)} texts", cores)
        problem = _difference(encoder.tokenizer, reference, texts + [f"{word}{word}" for word in words])
        if problem is None:
            return encoder
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is a BaseException
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        problem = f"gigatoken does not support this tokenizer: {reason}"
    if wanted == "gigatoken":
        raise DataError(f"{problem}; leave out --encoder gigatoken")
    return Workers(folder, problem, cores)


def _difference(tokenizer: Any, reference: "tokenizers.Tokenizer", texts: list[str]) -> str | None:
    """Return why the gigatoken tokenizer cannot replace `tokenizers`, None if it can."""
    ids, lengths = encode_with(tokenizer, texts)
    rows = np.split(ids, np.cumsum(lengths)[:-1])
    for text, row, expected in zip(texts, rows, _reference_ids(reference, texts), strict=True):
        if row.tolist() != expected:
            return f"gigatoken and tokenizers give different ids, first for {text[:40]!r}"
    return None


def _reference_ids(tokenizer: "tokenizers.Tokenizer", texts: list[str]) -> list[list[int]]:
    return [row.ids for row in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _sampled(texts: Texts, amount: int) -> list[str]:
    """Return the beginnings of up to `amount` evenly spread texts."""
    picked = np.unique(np.linspace(0, len(texts) - 1, amount).astype(int)).tolist() if texts else []
    some = [texts[i] for i in picked]
    return [(text if isinstance(text, str) else text.decode())[:SAMPLE_CHARACTERS] for text in some]


def _resident() -> int:
    """Return the resident memory of this process in bytes."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def _text_bytes(texts: Texts) -> int:
    return sum(len(text) if isinstance(text, bytes) or text.isascii() else len(text.encode()) for text in texts)


class _Worker:
    """State that a worker process keeps between chunks."""

    tokenizer: "tokenizers.Tokenizer"
    line: list[int] | None
    form: DocumentFormat


def _start_worker(folder: str, form: DocumentFormat) -> None:
    """Load the tokenizer. Ignore stop signals, which the parent handles; exit when the parent has exited."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from multiprocessing import parent_process
    from multiprocessing.connection import wait

    parent = parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    _Worker.tokenizer, _Worker.form = load_tokenizer(folder), form
    _Worker.line = line_without_space(_Worker.tokenizer)


def _work(chunk: Chunk) -> Encoded:
    texts: Texts = chunk.texts()
    ids, lengths = encode_pieces(_reference_rows, chunk, texts, _Worker.line)
    return assemble(chunk, texts, ids, lengths, _Worker.form)


def _reference_rows(texts: Texts) -> tuple[np.ndarray, np.ndarray]:
    rows = _reference_ids(_Worker.tokenizer, cast(list[str], texts))
    ids = np.concatenate([np.empty(0, np.uint32), *(np.array(row, np.uint32) for row in rows)])
    return ids, np.array([len(row) for row in rows], np.int64)
