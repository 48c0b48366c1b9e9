"""Statistics of a prepared data set, as a table and as JSON."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from llmtrain_data import units
from llmtrain_data.bounds import MAX_IDS
from llmtrain_data.errors import DataError
from llmtrain_data.ids import token_counts
from llmtrain_data.indexed import IndexedData, bin_path, idx_path
from llmtrain_data.output import json_text
from llmtrain_data.tokenizer import load_tokenizer, tokenizer_size

SHOWN_TOKENS, SHOWN_CHARACTERS = 200, 300
"""Tokens of a document that are decoded, and characters of it that are shown."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A prepared set. lengths: tokens per document (least, mean, median, 95th percentile, most).

    unigram_entropy: entropy of the token frequencies, nats per token. vocab: the tokenizer's vocabulary size, None
    without a tokenizer. begin: the id that begins each document, None if none is recorded. shown: beginnings of the
    first documents.
    """

    prefix: str
    documents: int
    sequences: int
    tokens: int
    dtype: str
    bytes: int
    lengths: dict[str, float]
    max_token: int
    different_tokens: int
    unigram_entropy: float
    vocab: int | None
    begin: int | None
    shown: list[str]

    def json(self) -> str:
        """Return the description as one JSON object."""
        return json_text(asdict(self))

    def facts(self) -> list[tuple[str, str]]:
        """Return the description as (name, value) rows."""
        lengths = ", ".join(f"{name} {value:.0f}" for name, value in self.lengths.items())
        vocab = f" of {self.vocab:,}" if self.vocab else ""
        begin = "" if self.begin is None else f", with the id {self.begin} before each text"
        return [
            ("documents", f"{self.documents:,} ({self.sequences:,} sequences){begin}"),
            ("tokens", f"{self.tokens:,} as {self.dtype}, {units.size(self.bytes)} on disk"),
            ("lengths", lengths),
            ("ids", f"{self.different_tokens:,}{vocab} occur, the largest is {self.max_token:,}"),
            ("entropy", f"{self.unigram_entropy:.3f} nats per token (of the token frequencies)"),
        ]


def describe(prefix: Path, tokenizer: Path | None, documents: int) -> Description:
    """Read a whole prepared set and describe it.

    documents: how many documents to show the beginnings of, as text if `tokenizer` (a folder) is given, else as ids.
    Raises DataError for a damaged set, and for a tokenizer whose vocabulary is too small for the set.
    """
    data = IndexedData(prefix)
    if data.dtype.kind not in "iu":
        raise DataError(f"{prefix}.bin holds {data.dtype} values; expected token ids, which are integers")
    vocab = tokenizer_size(tokenizer) if tokenizer else None
    counts = token_counts(data, 0, data.token_count, vocab or MAX_IDS)
    return Description(
        prefix=str(prefix),
        documents=data.documents,
        sequences=len(data.lengths),
        tokens=data.token_count,
        dtype=data.dtype.name,
        bytes=bin_path(prefix).stat().st_size + idx_path(prefix).stat().st_size,
        lengths=_lengths(data),
        max_token=len(counts) - 1,
        different_tokens=int((counts > 0).sum()),
        unigram_entropy=_entropy(counts),
        vocab=vocab,
        begin=data.begin,
        shown=_beginnings(data, tokenizer, min(documents, data.documents)),
    )


def _lengths(data: IndexedData) -> dict[str, float]:
    borders = np.append(data.pointers // data.dtype.itemsize, data.token_count)
    lengths = np.diff(borders[data.document_index])
    if len(lengths) == 0:
        return {}
    least, median, high, most = np.percentile(lengths, [0, 50, 95, 100]).tolist()
    return {"least": least, "mean": float(lengths.mean()), "median": median, "p95": high, "most": most}


def _entropy(counts: np.ndarray) -> float:
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(shares * np.log(shares)).sum()) + 0.0


def _beginnings(data: IndexedData, tokenizer: Path | None, documents: int) -> list[str]:
    ids = [data.document(number)[:SHOWN_TOKENS].tolist() for number in range(documents)]
    if tokenizer is None:
        return [" ".join(map(str, row))[:SHOWN_CHARACTERS] for row in ids]
    decoder = load_tokenizer(tokenizer)
    return [decoder.decode(row, skip_special_tokens=False)[:SHOWN_CHARACTERS] for row in ids]
