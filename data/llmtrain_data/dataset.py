"""Samples for training: windows of a prepared set or a blend of sets, in an endless seeded order."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from llmtrain_data.config import DataConfig
from llmtrain_data.errors import DataError
from llmtrain_data.indexed import IndexedData
from llmtrain_data.order import Interleave, epoch_keys, permute

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
BLOCK = 1 << 22
"""Tokens counted at once."""

LOOKED_AT = 1 << 26
"""Tokens that `Samples.max_token` reads at most, per source."""


@dataclass(frozen=True)
class Source:
    """The part of one prepared set that belongs to a split.

    tokens: its tokens, a view of the file. weight: its share of the blend.
    """

    prefix: str
    weight: float
    documents: int
    tokens: np.ndarray

    def samples(self, sequence_length: int) -> int:
        """Return the number of windows of `sequence_length + 1` tokens at a stride of `sequence_length`."""
        return max(len(self.tokens) - 1, 0) // sequence_length


class Samples:
    """The samples of one split: windows of sequence_length + 1 tokens, of which neighbours share one token.

    `len()` is the number of different samples. `batch` goes on for ever: each source is gone through in
    epochs that visit every one of its samples exactly once, each epoch in an order of its own, and in a blend
    the sources take turns by their weights.
    """

    def __init__(self, sources: list[Source], sequence_length: int) -> None:
        """Sample `sources`, each of which must hold at least one window."""
        self.sources = sources
        self.sequence_length = sequence_length
        self._sizes = [source.samples(sequence_length) for source in sources]
        self._interleave = Interleave([source.weight for source in sources])

    def __len__(self) -> int:
        return sum(self._sizes)

    def batch(self, seed: int, first: int, count: int) -> np.ndarray:
        """Return the samples at positions [first, first + count) of the endless order that `seed` gives.

        int64 of shape [count, sequence_length + 1]. Depends on its arguments and the data alone.
        """
        width = self.sequence_length + 1
        out = np.empty((count, width), np.int64)
        origins, turns = self._interleave(np.arange(first, first + count))
        for number, source in enumerate(self.sources):
            rows = np.flatnonzero(origins == number)
            epochs, samples = np.divmod(turns[rows], self._sizes[number])
            samples = permute(samples, self._sizes[number], epoch_keys(seed, number, epochs))
            starts = samples * self.sequence_length
            for row, start in zip(rows.tolist(), starts.tolist(), strict=True):
                out[row] = source.tokens[start : start + width]
        return out

    def unigram_entropy(self) -> float:
        """Return the entropy of the split's token frequencies in nats per token; sources count by weight.

        It is the loss of a model that knows nothing but how frequent each token is. Reads every token.
        """
        shares = [(source.weight, token_counts(source.tokens)) for source in self.sources]
        mixture = np.zeros(max(len(counts) for _, counts in shares))
        for weight, counts in shares:
            mixture[: len(counts)] += weight * counts / counts.sum()
        mixture = mixture[mixture > 0] / mixture.sum()
        return float(-(mixture * np.log(mixture)).sum())

    def max_token(self) -> int:
        """Return the largest token id.

        Reads at most 64 Mi tokens of each source, spread evenly: exact below that, else a lower bound.
        """
        return max(_largest(source.tokens) for source in self.sources)


def open_split(config: DataConfig, split: Split) -> Samples:
    """Open the training, validation or test part of the data set, or blend of sets, that `config` names.

    Raises DataError when a set is missing or damaged, or has too few tokens in the split for a single sample.
    """
    return Samples([_open_source(config, split, *entry) for entry in config.blend()], config.sequence_length)


def split_bounds(documents: int, shares: tuple[float, float, float]) -> list[int]:
    """Return the 4 borders of the contiguous document ranges of training, validation and test.

    Rounded as Megatron does, but a split with a share gets a document if there are enough of them.
    """
    ends = np.rint(np.cumsum(shares) / sum(shares) * documents).astype(int).tolist()
    for i in (1, 0):
        after = sum(share > 0 for share in shares[i + 1 :])
        upto = sum(share > 0 for share in shares[: i + 1])
        ends[i] = max(min(ends[i], documents - after), min(upto, documents))
    return [0, *ends]


def token_counts(tokens: np.ndarray) -> np.ndarray:
    """Return how often each id occurs, int64 of shape [largest id + 1]; ids must not be negative."""
    counts = np.zeros(1, np.int64)
    for start in range(0, len(tokens), BLOCK):
        found = np.bincount(tokens[start : start + BLOCK])
        if len(found) < len(counts):
            found, counts = counts, found
        found[: len(counts)] += counts
        counts = found
    return counts


def _open_source(config: DataConfig, split: Split, weight: float, prefix: str) -> Source:
    data = IndexedData(prefix)
    if data.dtype.kind not in "iu":
        raise DataError(f"{prefix}.bin holds {data.dtype} values; expected token ids, which are integers")
    bounds = split_bounds(data.documents, config.split)
    number = SPLITS.index(split)
    first, last = bounds[number], bounds[number + 1]
    tokens = data.tokens[data.token_offset(first) : data.token_offset(last)]
    source = Source(prefix, weight, last - first, tokens)
    if source.samples(config.sequence_length) == 0:
        raise DataError(
            f"the {split} split of {prefix} has {len(tokens)} tokens in {last - first} of {data.documents} "
            f"documents, too few for one sample of data.sequence_length + 1 = {config.sequence_length + 1}; "
            f"give it a larger share in data.split, shorten data.sequence_length, or prepare more data"
        )
    return source


def _largest(tokens: np.ndarray) -> int:
    """Return the largest id in up to LOOKED_AT tokens, in 64 blocks spread evenly."""
    if len(tokens) <= LOOKED_AT:
        return int(tokens.max())
    block = LOOKED_AT // 64
    starts = np.linspace(0, len(tokens) - block, 64).astype(np.int64)
    return max(int(tokens[start : start + block].max()) for start in starts)
