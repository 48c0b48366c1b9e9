"""Encoders: gigatoken where it gives the ids that `tokenizers` gives, else `tokenizers` on every core."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc

from llmtrain_data.errors import DataError
from llmtrain_data.readers import Chunk
from llmtrain_data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import tokenizers

ENCODERS = ("auto", "gigatoken", "tokenizers")
CACHE = 128 << 20
"""Bytes that gigatoken's cache of words may add to the process before it is emptied."""

SAMPLE_TEXTS, SAMPLE_CHARACTERS = 64, 4096
"""The texts, and the characters of each, that both encoders must agree on before the first chunk."""

CHECKED_CHARACTERS = 2048
"""Characters of one text of every further chunk that both must agree on."""

SPECIMENS = (
    " a  b\t\tc\n\n  d\r\n\u00a0\u3000e ",
    "don't WE'LL 12345678 3.14e-10 x_1 #!/$%^&*()",
    "Gr\u00fc\u00dfe, \u0645\u0631\u062d\u0628\u0627, \u4f60\u597d, e\u0301, \u212b",
    "\U0001f469\u200d\U0001f680 \ufb01\u200b",
    "\x00\x01\x7f\ufffd <|endoftext|> <s></s> [UNK]",
)
"""Texts in which tokenizers differ first: white space, digits, contractions, other scripts, specials."""


@dataclass(frozen=True)
class Encoded:
    """The ids of a chunk's texts, one after another, and the number of ids of each."""

    chunk: Chunk
    ids: np.ndarray
    lengths: np.ndarray


class Encoder(Protocol):
    """Turns chunks of text into ids, in order. name and reason: which encoder it is and why it was taken."""

    name: str
    reason: str

    def stream(self, chunks: Iterator[Chunk]) -> Iterator[Encoded]:
        """Encode chunk after chunk."""


class Gigatoken:
    """Gigatoken on all cores, watched: one text of each chunk is held against `tokenizers`."""

    name = "gigatoken"

    def __init__(self, description: str, reference: "tokenizers.Tokenizer", reason: str) -> None:
        self.reason = reason
        self._description = description
        self._reference = reference
        self._load()

    def stream(self, chunks: Iterator[Chunk]) -> Iterator[Encoded]:
        """Encode chunk after chunk. Raises DataError where the two encoders differ."""
        for chunk in chunks:
            ids, lengths = self.encode(chunk.texts)
            self._watch(chunk.texts)
            yield Encoded(chunk, ids, lengths)
            if psutil.Process().memory_info().rss > self._memory + CACHE:
                self._load()

    def encode(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts (uint32), and how many each has (int64)."""
        import awkward

        if texts.null_count:
            texts = texts.fill_null("")
        rows = self._tokenizer.encode_batch(awkward.from_arrow(texts, highlevel=True))
        layout = rows.layout
        offsets = np.asarray(layout.offsets)
        return np.asarray(layout.content.data)[offsets[0] : offsets[-1]], np.diff(offsets)

    def _load(self) -> None:
        import gigatoken

        self._tokenizer = gigatoken.Tokenizer.from_json(self._description)
        self._memory = psutil.Process().memory_info().rss

    def _watch(self, texts: pa.Array) -> None:
        text = (texts[len(texts) // 2].as_py() or "")[:CHECKED_CHARACTERS]
        if self._tokenizer.encode(text).tolist() != _reference_ids(self._reference, [text])[0]:
            raise DataError(
                f"gigatoken and tokenizers encode {text[:40]!r} differently; take --encoder tokenizers"
            )


class Workers:
    """`tokenizers` in one process per core, each with a part of every chunk."""

    name = "tokenizers"

    def __init__(self, folder: Path, reason: str, workers: int) -> None:
        self.reason = reason
        self._folder = folder
        self._workers = workers

    def stream(self, chunks: Iterator[Chunk]) -> Iterator[Encoded]:
        """Encode chunks, of which as many are under way as keep all workers busy."""
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(self._workers, context, _start_worker, (str(self._folder),))
        waiting: deque[tuple[Chunk, list[Future[tuple[np.ndarray, np.ndarray]]]]] = deque()
        try:
            for chunk in chunks:
                waiting.append(
                    (chunk, [pool.submit(_encode_part, part) for part in self._parts(chunk.texts)])
                )
                if len(waiting) > 2:
                    yield _gather(*waiting.popleft())
            while waiting:
                yield _gather(*waiting.popleft())
        except BrokenProcessPool as error:
            raise DataError(
                "a worker that encodes text was ended from outside, by lack of memory?"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _parts(self, texts: pa.Array) -> list[pa.Array]:
        """Cut a chunk into parts of about equal bytes, several for each worker."""
        ends = np.cumsum(pc.binary_length(texts).fill_null(0).to_numpy(zero_copy_only=False))
        parts = 4 * self._workers
        borders = np.searchsorted(ends, np.linspace(0, ends[-1], parts + 1)[1:-1]) + 1
        starts = np.unique(np.clip([0, *borders, len(texts)], 0, len(texts))).tolist()
        return [texts[first:last] for first, last in pairwise(starts)]


def choose_encoder(folder: Path, sample: pa.Array, wanted: str, workers: int | None) -> Encoder:
    """Return the encoder for the tokenizer in `folder`, with the reason for it.

    gigatoken if it takes the tokenizer and gives the ids of `tokenizers` on texts of `sample` and on a few
    hard ones. workers: cores to use (None: all). Raises DataError if gigatoken was asked for and cannot be
    used.
    """
    reference = load_tokenizer(folder)
    cores = workers or len(os.sched_getaffinity(0))
    if wanted == "tokenizers":
        return Workers(folder, "asked for", cores)
    if workers:
        os.environ["RAYON_NUM_THREADS"] = str(workers)
    texts = [*SPECIMENS, *_sampled(sample)]
    try:
        candidate = Gigatoken(reference.to_str(), reference, f"same ids as tokenizers on {len(texts)} texts")
        ids, lengths = candidate.encode(pa.array(texts, pa.large_string()))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is no Exception
        problem = (
            f"gigatoken does not take this tokenizer: {str(error).splitlines()[0] if str(error) else error!r}"
        )
    else:
        rows = [row.tolist() for row in np.split(ids, np.cumsum(lengths)[:-1])]
        expected = _reference_ids(reference, texts)
        different = next((text for text, a, b in zip(texts, rows, expected, strict=True) if a != b), None)
        if different is None:
            return candidate
        problem = f"gigatoken gives other ids than tokenizers, first in {different[:40]!r}"
    if wanted == "gigatoken":
        raise DataError(f"{problem}; leave out --encoder gigatoken")
    return Workers(folder, problem, cores)


def _reference_ids(tokenizer: "tokenizers.Tokenizer", texts: list[str]) -> list[list[int]]:
    return [row.ids for row in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _sampled(texts: pa.Array) -> list[str]:
    """Return the beginnings of texts spread over the array."""
    picked = (
        np.unique(np.linspace(0, len(texts) - 1, SAMPLE_TEXTS).astype(int)).tolist() if len(texts) else []
    )
    return [(texts[i].as_py() or "")[:SAMPLE_CHARACTERS] for i in picked]


def _gather(chunk: Chunk, parts: list[Future[tuple[np.ndarray, np.ndarray]]]) -> Encoded:
    results = [part.result() for part in parts]
    ids = np.concatenate([ids for ids, _ in results])
    return Encoded(chunk, ids, np.concatenate([lengths for _, lengths in results]))


class _Worker:
    """What a worker process keeps between parts."""

    tokenizer: "tokenizers.Tokenizer"


def _start_worker(folder: str) -> None:
    """Load the tokenizer; leave Ctrl-C to the parent, and end when the parent has ended, however it did."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    _Worker.tokenizer = load_tokenizer(folder)


def _encode_part(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    rows = _reference_ids(_Worker.tokenizer, [text or "" for text in texts.to_pylist()])
    lengths = np.array([len(row) for row in rows], np.int64)
    return np.concatenate([np.empty(0, np.uint32), *(np.array(row, np.uint32) for row in rows)]), lengths
