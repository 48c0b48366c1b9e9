"""Token ids of a prepared set: range checks and frequencies."""

import numpy as np

from llmtrain_data.errors import DataError
from llmtrain_data.indexed import IndexedData

READ_AT_ONCE = 1 << 22
"""Tokens per read."""


def check_ids(data: IndexedData, first: int, tokens: np.ndarray, vocab: int) -> None:
    """Raise DataError if one of `tokens` is not in 0 to `vocab` - 1. first: position of `tokens` in `data`."""
    if len(tokens) == 0 or (tokens.min() >= 0 and tokens.max() < vocab):
        return
    index = int(((tokens < 0) | (tokens >= vocab)).argmax())
    number = data.document_of(first + index)
    raise DataError(
        f"{data.prefix}.bin holds id {tokens[index]} at token {first + index - data.token_offset(number)} of document "
        f"{number}; expected 0 to {vocab - 1}, the ids of the vocabulary (model.vocab, or the tokenizer's), so prepare "
        "the data with the matching tokenizer"
    )


def token_counts(data: IndexedData, first: int, last: int, vocab: int) -> np.ndarray:
    """Return how often each id occurs in the tokens `[first, last)`, int64 of shape [largest id + 1].

    Raises DataError for an id outside 0 to `vocab` - 1.
    """
    counts = np.zeros(1, np.int64)
    for start in range(first, last, READ_AT_ONCE):
        tokens = data.read(start, min(start + READ_AT_ONCE, last))
        check_ids(data, start, tokens, vocab)
        found = np.bincount(tokens)
        if len(found) < len(counts):
            found, counts = counts, found
        found[: len(counts)] += counts
        counts = found
    return counts
