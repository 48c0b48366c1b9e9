"""Sampling: a batch depends on seed and position alone, an epoch visits everything once, blends keep their shares."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from llmtrain_data.blend import plan_blend
from llmtrain_data.config import DataConfig
from llmtrain_data.dataset import open_split, split_bounds
from llmtrain_data.errors import DataError
from llmtrain_data.indexed import IndexedWriter
from llmtrain_data.sample_order import Interleave, epoch_keys, permute
from omegaconf import OmegaConf

LENGTH = 8


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two sets whose tokens count up: `a` from 0 in 100 documents, `b` from 10000 in 50."""
    for name, first, documents in (("a", 0, 100), ("b", 10000, 50)):
        lengths = np.arange(documents) % 7 + 20
        writer = IndexedWriter(tmp_path / name, np.dtype("uint16"))
        writer.add(first + np.arange(lengths.sum()), lengths)
        writer.commit()
    return tmp_path


def config(path: str | list[str | float], **keys: object) -> DataConfig:
    return DataConfig(path=path, sequence_length=LENGTH, **keys)  # type: ignore[arg-type]


def test_samples_are_windows_that_share_one_token(corpus: Path) -> None:
    samples = open_split(config(str(corpus / "a"), split=(100, 0, 0)), "train")
    rows = samples.batch(0, 0, len(samples))
    assert rows.dtype == np.int64
    assert rows.shape == (len(samples), LENGTH + 1)
    rows = rows[rows[:, 0].argsort()]  # The tokens of this set count up.
    assert (rows == np.arange(len(samples))[:, None] * LENGTH + np.arange(LENGTH + 1)).all()


def test_splits_are_contiguous_ranges_of_documents(corpus: Path) -> None:
    lengths = np.arange(100) % 7 + 20
    ends = np.cumsum(lengths)
    tokens = {}
    for split in ("train", "valid", "test"):
        samples = open_split(config(str(corpus / "a"), split=(80, 10, 10)), split)
        tokens[split] = samples.sources[0].read(0, samples.sources[0].token_count)
    assert tokens["train"].tolist() == list(range(ends[79]))
    assert tokens["valid"].tolist() == list(range(ends[79], ends[89]))
    assert tokens["test"].tolist() == list(range(ends[89], ends[99]))


def test_every_split_with_a_share_gets_a_document() -> None:
    assert split_bounds(1000, (98, 1, 1)) == [0, 980, 990, 1000]
    assert split_bounds(10, (98, 1, 1)) == [0, 8, 9, 10]
    assert split_bounds(10, (99, 1, 0)) == [0, 9, 10, 10]
    assert split_bounds(10, (100, 0, 0)) == [0, 10, 10, 10]
    assert split_bounds(2, (98, 1, 1)) == [0, 1, 2, 2]
    assert split_bounds(0, (98, 1, 1)) == [0, 0, 0, 0]


def test_batches_do_not_depend_on_how_they_are_cut(corpus: Path) -> None:
    blend = config([0.7, str(corpus / "a"), 0.3, str(corpus / "b")])
    whole = open_split(blend, "train").batch(7, 0, 600)
    pieces = [open_split(blend, "train").batch(7, first, 5) for first in range(0, 600, 5)]
    assert (np.concatenate(pieces) == whole).all()
    assert (open_split(blend, "train").batch(8, 0, 600) != whole).any()


def test_an_epoch_visits_every_sample_once_in_an_order_of_its_own(corpus: Path) -> None:
    samples = open_split(config(str(corpus / "a")), "train")
    n = len(samples)
    starts = samples.batch(3, 0, 3 * n)[:, 0].reshape(3, n)
    for epoch in starts:
        assert sorted(epoch) == [LENGTH * i for i in range(n)]
    assert not (starts[0] == starts[1]).all()
    assert not (starts[1] == starts[2]).all()
    assert np.abs(np.corrcoef(starts[0], np.arange(n))[0, 1]) < 0.3


def test_a_blend_in_parts(corpus: Path) -> None:
    path: list[str | float] = [3, str(corpus / "a"), 1, str(corpus / "b")]
    samples = open_split(config(path, split=(90, 10, 0)), "valid")
    a, b = (source.samples(LENGTH) for source in samples.sources)
    assert [(part.count, part.share) for part in samples.whole()] == [(a, 0.75), (b, 0.25)]
    # The order draws three times as many of `a`.
    draws = 4 * (a // 3)
    (first,) = samples.without_repeats(draws)
    assert (first.samples, first.count, first.share) == (samples, draws, 1.0)
    assert [(part.count, part.share) for part in samples.without_repeats(4 * a)] == [(a, 0.75), (min(a, b), 0.25)]
    rows = [part.samples.batch(0, 0, part.count) for part in samples.without_repeats(4 * a)]
    assert len(np.unique(np.concatenate(rows), axis=0)) == a + min(a, b)


def test_the_parts_of_one_set_are_its_samples(corpus: Path) -> None:
    samples = open_split(config(str(corpus / "a")), "train")
    for (part,) in (samples.whole(), samples.without_repeats(10**15)):
        assert (part.count, part.share) == (len(samples), 1.0)
        assert (part.samples.batch(0, 0, part.count) == samples.batch(0, 0, part.count)).all()


def test_a_source_that_is_not_drawn_is_no_part(corpus: Path) -> None:
    path: list[str | float] = [999, str(corpus / "a"), 1, str(corpus / "b")]
    samples = open_split(config(path, split=(90, 10, 0)), "valid")
    (part,) = samples.without_repeats(100)
    assert (part.count, part.share) == (samples.sources[0].samples(LENGTH), 1.0)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 1000, 4097])
def test_permutation_is_one_to_one(n: int) -> None:
    for epoch in range(3):
        keys = epoch_keys(1234, 0, np.full(n, epoch))
        assert sorted(permute(np.arange(n), n, keys).tolist()) == list(range(n))


def test_permutation_spreads_evenly() -> None:
    """Position 0 of 10 in 20,000 epochs: each place comes 2,000 times, within 5 standard deviations."""
    places = permute(np.zeros(20000, np.int64), 10, epoch_keys(1, 0, np.arange(20000)))
    counts = Counter(places.tolist())
    assert all(abs(counts[place] - 2000) < 5 * np.sqrt(1800) for place in range(10))


@pytest.mark.parametrize("positions", [0, 1, 9, 10, 123])
def test_positions_of_each_source_are_counted(positions: int) -> None:
    order = Interleave([0.7, 0.2, 0.1])
    assert order.counts(positions) == np.bincount(order(np.arange(positions))[0], minlength=3).tolist()


@pytest.mark.parametrize(
    "weights", [[0.7, 0.3], [1.0], [1, 1, 1], [0.9, 0.05, 0.03, 0.02], [0.998, 0.001, 0.001], [1 / 3, 2 / 3]]
)
def test_blend_keeps_its_shares_at_every_prefix(weights: list[float]) -> None:
    n = 5000
    sources, turns = Interleave(weights)(np.arange(n))
    counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    shares = np.array(weights) / sum(weights) * np.arange(1, n + 1)[:, None]
    assert np.abs(counts - shares).max() < 1
    assert (turns == np.take_along_axis(counts, sources[:, None], 1)[:, 0] - 1).all()


def test_blend_with_odd_and_tiny_weights() -> None:
    weights = [1.0, np.pi, 1e-9]
    sources, _ = Interleave(weights)(np.arange(200000))
    counts = np.bincount(sources, minlength=3)
    assert counts[2] >= 1
    assert np.abs(counts / 200000 - np.array(weights) / sum(weights)).max() < 1e-4


def test_entropy(corpus: Path) -> None:
    writer = IndexedWriter(corpus / "c", np.dtype("int32"))
    writer.add(np.array([5, 9, 9, 9] * 10), np.full(10, 4))
    writer.commit()
    samples = open_split(config(str(corpus / "c"), split=(100, 0, 0)), "train")
    assert samples.unigram_entropy() == pytest.approx(-(0.25 * np.log(0.25) + 0.75 * np.log(0.75)))
    blend = open_split(config([1, str(corpus / "c"), 3, str(corpus / "a")], split=(100, 0, 0)), "train")
    n = blend.sources[1].token_count
    shares = np.full(n, 0.75 / n)
    shares[5] += 0.25 * 0.25
    shares[9] += 0.25 * 0.75
    assert blend.unigram_entropy() == pytest.approx(-(shares * np.log(shares)).sum())


def test_a_split_too_small_for_a_sample_is_refused(corpus: Path) -> None:
    with pytest.raises(DataError, match=r"test split of .*data\.split"):
        open_split(config(str(corpus / "a"), split=(99, 1, 0)), "test")
    with pytest.raises(DataError, match=r"too few for one sample of data\.sequence_length"):
        open_split(DataConfig(path=str(corpus / "a"), sequence_length=5000), "train")


@pytest.mark.parametrize("path", [[0.5], [0.5, "a", "b"], [0, "a"], ["a", 0.5], [], [1.0, 2.0]])
def test_malformed_blends_are_refused(path: list[str | float]) -> None:
    with pytest.raises(ValueError, match="expected a blend"):
        DataConfig(path=path)


def test_a_blend_is_written_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a: b", "c #d", "null", "😀x", "e"):
        writer = IndexedWriter(tmp_path / name, np.dtype("uint16"))
        writer.add(np.zeros(4000), np.full(400, 10))
        writer.commit()
    path = [1234567.891, "a: b", 2, "c #d", 3e-7, str(tmp_path / "e"), 1, "null", 1, "😀x"]
    assert OmegaConf.create(plan_blend([*map(str, path)], None, 8, "98,1,1").yaml).data.path == path
