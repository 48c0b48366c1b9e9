"""Prepare warns of a validation split of another domain or of few documents, and of no other split."""

from pathlib import Path

import numpy as np
import pytest
from llmtrain_data import dataset
from llmtrain_data.config import DataConfig
from llmtrain_data.dataset import open_split
from llmtrain_data.domain import distance_ratio, validation_warnings
from llmtrain_data.indexed import IndexedWriter

VOCAB, END = 2000, 2000


def domain(seed: int) -> np.ndarray:
    """Return token frequencies of the 12 topics of a domain; each domain and each topic has its own words."""
    random = np.random.default_rng(seed)
    weights = random.gamma(0.4, size=VOCAB) * random.gamma(2, size=(12, VOCAB)) / np.arange(1, VOCAB + 1)
    return weights / weights.sum(1, keepdims=True)


def documents(topics: np.ndarray, count: int, random: np.random.Generator) -> list[np.ndarray]:
    """Return documents of one topic each; a few of them are far longer than the others."""
    lengths = np.minimum(np.exp(random.normal(5, 1.3, count)).astype(int) + 2, 20000)
    return [np.append(random.choice(VOCAB, length, p=topics[random.integers(len(topics))]), END) for length in lengths]


def written(path: Path, texts: list[np.ndarray]) -> DataConfig:
    writer = IndexedWriter(path, np.dtype("uint16"))
    writer.add(np.concatenate(texts), np.array([len(text) for text in texts]))
    writer.commit()
    return DataConfig(path=str(path), sequence_length=8, split=(95, 5, 0))


def warnings(config: DataConfig) -> list[str]:
    return validation_warnings(open_split(config, "train"), open_split(config, "valid"))


@pytest.mark.parametrize("seed", range(12))
def test_no_alarm_where_both_splits_are_of_one_domain(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    texts = documents(np.concatenate([domain(0), domain(1)]), 500, random)
    assert warnings(written(tmp_path / "one", texts)) == []


@pytest.mark.parametrize("seed", range(4))
def test_another_domain_at_the_end_is_told(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    # A corpus ordered by domain also trains on a part of the last domain.
    texts = documents(domain(0), 440, random) + documents(domain(1), 60, random)
    (sentence,) = warnings(written(tmp_path / "two", texts))
    assert "is of another domain than its training split" in sentence
    random.shuffle(texts)
    assert warnings(written(tmp_path / "shuffled", texts)) == []


def test_few_documents_are_told(tmp_path: Path) -> None:
    texts = documents(domain(0), 380, np.random.default_rng(0))
    (sentence,) = warnings(written(tmp_path / "few", texts))
    assert "has fewer than 20 documents (19)" in sentence


def test_pieces_of_one_text_are_not_compared(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    texts = [text[:-1] for text in documents(domain(0), 440, random) + documents(domain(1), 60, random)]
    config = written(tmp_path / "pieces", texts)
    assert distance_ratio(*(open_split(config, split).sources[0] for split in ("train", "valid"))) is None


def test_entropy_of_a_large_split_reads_a_part_of_it_and_always_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    config = written(tmp_path / "large", documents(domain(0), 2000, random))
    whole = open_split(config, "train").unigram_entropy()
    monkeypatch.setattr(dataset, "READ_AT_ONCE", 500)
    assert open_split(config, "train").unigram_entropy() == whole
    monkeypatch.setattr(dataset, "MAX_SCANNED", 50_000)
    samples, read = open_split(config, "train"), 0
    original = samples.sources[0].data.read

    def counted(first: int, last: int) -> np.ndarray:
        nonlocal read
        read += last - first
        return original(first, last)

    monkeypatch.setattr(samples.sources[0].data, "read", counted)
    sampled = samples.unigram_entropy()
    assert read == 50_000 < samples.sources[0].token_count
    assert sampled == open_split(config, "train").unigram_entropy() == pytest.approx(whole, rel=0.05)


def test_documents_that_are_all_alike_are_not_compared(tmp_path: Path) -> None:
    texts = [np.array([1, 2, END])] * 475 + [np.array([3, 4, END])] * 25
    assert warnings(written(tmp_path / "alike", texts)) == []
