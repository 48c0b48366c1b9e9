"""Training samples: fixed-length windows of a prepared set or a blend of sets, in an endless seeded order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from llmtrain_data.bounds import MAX_IDS
from llmtrain_data.config import DataConfig
from llmtrain_data.errors import DataError
from llmtrain_data.files import allow_many_files
from llmtrain_data.ids import READ_AT_ONCE, check_ids, token_counts
from llmtrain_data.indexed import IndexedData
from llmtrain_data.sample_order import Interleave, epoch_keys, permute

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
MAX_SCANNED = 1 << 26
"""Most tokens per source that `Samples.check_ids` and `Samples.unigram_entropy` read."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The range of one prepared set that belongs to a split: tokens `[first, last)`, which are `documents` documents
    from `first_document` on. weight: share of the blend. vocab: valid ids are 0 to vocab - 1."""

    data: IndexedData
    weight: float
    documents: int
    first: int
    last: int
    first_document: int = 0
    vocab: int = MAX_IDS

    @property
    def token_count(self) -> int:
        """Number of tokens."""
        return self.last - self.first

    def samples(self, sequence_length: int) -> int:
        """Return the number of windows of `sequence_length + 1` tokens at a stride of `sequence_length`."""
        return max(self.token_count - 1, 0) // sequence_length

    def read(self, start: int, end: int) -> np.ndarray:
        """Return the tokens `[start, end)` of this range as a view of the file. Verifies their checksums."""
        return self.data.read(self.first + start, self.first + end)

    def check_ids(self, start: int, tokens: np.ndarray) -> None:
        """Raise DataError if one of `tokens` is not in the vocabulary. start: position of the first one."""
        check_ids(self.data, self.first + start, tokens, self.vocab)

    def beginning(self, document: int, most: int) -> np.ndarray:
        """Return the first tokens, at most `most`, of document `document` of this range. Raises as `check_ids`."""
        start, end = (self.data.token_offset(self.first_document + document + more) - self.first for more in (0, 1))
        tokens = self.read(start, min(start + most, end))
        self.check_ids(start, tokens)
        return tokens


@dataclass(frozen=True)
class SamplePart:
    """The first `count` samples of the order of `samples`. share: weight of their mean loss in that of all parts of an
    evaluation; the shares sum to 1."""

    samples: "Samples"
    count: int
    share: float


class Samples:
    """The samples of one split: windows of sequence_length + 1 tokens. Neighbouring windows share one token.

    `len()` is the number of different samples. The order of `batch` is endless. It consists of epochs: each epoch
    visits every sample of a source exactly once, in a new order. A blend interleaves its sources by weight.
    """

    def __init__(self, sources: list[Source], sequence_length: int) -> None:
        """Sample `sources`. Each must hold at least one window."""
        self.sources = sources
        self.sequence_length = sequence_length
        self._vocab = min(source.vocab for source in sources)
        self._sizes = [source.samples(sequence_length) for source in sources]
        self._interleave = Interleave([source.weight for source in sources])

    def __len__(self) -> int:
        return sum(self._sizes)

    def batch(self, seed: int, first: int, count: int) -> np.ndarray:
        """Return the samples at positions [first, first + count) of the endless order for `seed`.

        int64 of shape [count, sequence_length + 1]; a function of the arguments and the data alone. Raises DataError if
        the data is damaged or holds an id outside the vocabulary.
        """
        width = self.sequence_length + 1
        out = np.empty((count, width), np.int64)
        origins, ranks = self._interleave(np.arange(first, first + count))
        starts = np.empty(count, np.int64)
        for number, source in enumerate(self.sources):
            source.data.notice_changes()
            rows = np.flatnonzero(origins == number)
            epochs, samples = np.divmod(ranks[rows], self._sizes[number])
            samples = permute(samples, self._sizes[number], epoch_keys(seed, number, epochs))
            starts[rows] = samples * self.sequence_length
            for row, start in zip(rows.tolist(), starts[rows].tolist(), strict=True):
                out[row] = source.read(start, start + width)
        if count and (out.min() < 0 or out.max() >= self._vocab):
            # The test of the whole batch is fast. Only if it fails, find the wrong id.
            for tokens, origin, start in zip(out, origins.tolist(), starts.tolist(), strict=True):
                self.sources[origin].check_ids(start, tokens)
        return out

    def whole(self) -> list[SamplePart]:
        """Return one part per source, with all its samples. The shares are the sources' weights."""
        return [
            SamplePart(Samples([source], self.sequence_length), size, source.weight)
            for source, size in zip(self.sources, self._sizes, strict=True)
        ]

    def without_repeats(self, count: int) -> list[SamplePart]:
        """Return the first `count` samples of the endless order as one part, if they are different samples.

        Else return one part per source, with as many samples as the source has among these, but at most all of its
        samples. The shares are the sources' shares of the `count` samples.
        """
        counts = self._interleave.counts(count)
        if all(drawn <= size for drawn, size in zip(counts, self._sizes, strict=True)):
            return [SamplePart(self, count, 1.0)]
        return [
            SamplePart(whole.samples, min(drawn, whole.count), drawn / count)
            for whole, drawn in zip(self.whole(), counts, strict=True)
            if drawn
        ]

    def unigram_entropy(self, moving: Callable[[], None] = lambda: None) -> float:
        """Return the entropy of the split's token frequencies in nats per token; sources count by weight.

        It is the loss of a model that knows only the token frequencies. Reads at most 64 Mi evenly spread tokens of
        each source, always the same ones. moving: called after each read.
        """
        shares = []
        for source in self.sources:
            counts = np.zeros(self._vocab, np.int64)
            for start, end in _scanned_ranges(source.token_count):
                found = token_counts(source.data, source.first + start, source.first + end, self._vocab)
                counts[: len(found)] += found
                moving()
            shares.append((source.weight, counts))
        mixture = np.zeros(max(len(counts) for _, counts in shares))
        for weight, counts in shares:
            mixture[: len(counts)] += weight * counts / counts.sum()
        mixture = mixture[mixture > 0] / mixture.sum()
        return float(-(mixture * np.log(mixture)).sum())

    def check_ids(self, moving: Callable[[], None] = lambda: None) -> None:
        """Raise DataError for an id outside the vocabulary.

        Reads at most 64 Mi evenly spread tokens of each source; `batch` checks everything that it reads. moving: called
        after each read.
        """
        for source in self.sources:
            for start, end in _scanned_ranges(source.token_count):
                source.check_ids(start, source.read(start, end))
                moving()

    def begins(self) -> dict[str, int | None]:
        """Return, by the prefix of each set, the id that begins each of its documents; None if none is recorded."""
        return {source.data.prefix: source.data.begin for source in self.sources}

    def unverified(self) -> list[str]:
        """Return the prefixes of the sets without checksums."""
        return list(dict.fromkeys(source.data.prefix for source in self.sources if source.data.checksums is None))


def open_split(config: DataConfig, split: Split, vocab: int = MAX_IDS) -> Samples:
    """Open one split of the data set, or blend of sets, that `config` names: of `validation`, if it is given, all
    documents are the validation split.

    vocab: valid ids are 0 to vocab - 1. Raises DataError if a set is missing or damaged, or has too few tokens in the
    split for a single sample.
    """
    if split == "valid" and config.validation is not None:
        return open_split(config.all_of(config.validation), "train", vocab)
    allow_many_files()
    return Samples([_open_source(config, split, vocab, *entry) for entry in config.blend()], config.sequence_length)


def split_bounds(documents: int, shares: tuple[float, float, float]) -> list[int]:
    """Return the 4 borders of the contiguous document ranges of training, validation and test.

    Rounds as Megatron does, except that every split with a share above 0 gets a document if there are enough of them.
    """
    ends = np.rint(np.cumsum(shares) / sum(shares) * documents).astype(int).tolist()
    for i in (1, 0):
        after = sum(share > 0 for share in shares[i + 1 :])
        upto = sum(share > 0 for share in shares[: i + 1])
        ends[i] = max(min(ends[i], documents - after), min(upto, documents))
    return [0, *ends]


def _open_source(config: DataConfig, split: Split, vocab: int, weight: float, prefix: str) -> Source:
    data = IndexedData(prefix)
    if data.dtype.kind not in "iu":
        raise DataError(f"{prefix}.bin holds {data.dtype} values; expected token ids, which are integers")
    bounds = split_bounds(data.documents, config.shares)
    number = SPLITS.index(split)
    first, last = bounds[number], bounds[number + 1]
    source = Source(
        data=data,
        weight=weight,
        documents=last - first,
        first=data.token_offset(first),
        last=data.token_offset(last),
        first_document=first,
        vocab=vocab,
    )
    if source.samples(config.sequence_length) == 0:
        part = "" if source.documents == data.documents else f"the {split} split of "
        raise DataError(
            f"{part}{prefix} has {source.token_count} tokens in {source.documents} of {data.documents} documents, too "
            f"few for one sample of data.sequence_length + 1 = {config.sequence_length + 1}; "
            f"{part and 'give it a larger share in data.split, '}shorten data.sequence_length, or prepare more data"
        )
    return source


def _scanned_ranges(tokens: int) -> list[tuple[int, int]]:
    """Return ranges of READ_AT_ONCE tokens that cover all tokens, or MAX_SCANNED of them, evenly spread."""
    starts = range(0, tokens, READ_AT_ONCE)
    if tokens > MAX_SCANNED:
        starts = np.linspace(0, tokens - READ_AT_ONCE, MAX_SCANNED // READ_AT_ONCE).astype(np.int64).tolist()
    return [(start, min(start + READ_AT_ONCE, tokens)) for start in starts]
