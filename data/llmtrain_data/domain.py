"""Warnings about a validation split that is too small or of another domain than the training split.

Splits are contiguous ranges of documents. If a corpus is ordered by domain, validation uses only its last domain.
"""

import numpy as np

from llmtrain_data.dataset import Samples, Source

MIN_DOCUMENTS = 20
"""A validation split with fewer documents is too small: its loss depends on the choice of documents."""

GROUPS, DOCUMENTS, LONGEST = 8, 64, 1024
"""Number of training groups, most documents of a group, and most tokens that are read of a document."""

MAX_DISTANCE_RATIO = 1.6
"""A `distance_ratio` above this value means another domain."""


def validation_warnings(training: Samples, validation: Samples) -> list[str]:
    """Return a sentence for each set whose validation split is too small or of another domain than its training split.
    Reads at most 0.6 Mi tokens of a set, always the same ones."""
    found = []
    for train, valid in zip(training.sources, validation.sources, strict=True):
        prefix = valid.data.prefix
        if valid.documents < MIN_DOCUMENTS:
            found.append(
                f"the validation split of {prefix} has fewer than {MIN_DOCUMENTS} documents ({valid.documents}); its "
                "loss depends on the choice of documents; give it more by a larger second share in data.split"
            )
        elif (times := distance_ratio(train, valid)) is not None and times > MAX_DISTANCE_RATIO:
            found.append(
                f"the validation split of {prefix} is of another domain than its training split: its token frequencies "
                f"are {times:.1f} times as far from the training data as those of any equally large group of training "
                "documents; prepare the data with its documents shuffled"
            )
    return found


def distance_ratio(train: Source, valid: Source) -> float | None:
    """Return the distance of validation documents from training documents, relative to the largest distance of a group
    of training documents from the other groups.

    Returns None if there are too few documents, if all are identical, or if they do not all end with the same token:
    then they are pieces of one text, and neighbouring pieces resemble each other as documents of one domain do.

    The distance is the Jensen-Shannon divergence of token frequencies. All groups have equally many documents, so the
    distances between training groups measure the spread within one domain, chance included. The groups take adjacent
    documents at evenly spread places, so all of them contain the same domains, whatever the order of the corpus.
    """
    if not (_all_end(train) and _all_end(valid)):
        return None
    size = min(DOCUMENTS, valid.documents, train.documents // GROUPS)
    if size < MIN_DOCUMENTS:
        return None
    groups = [
        [train.beginning(int(first) + group, LONGEST) for first in np.linspace(0, train.documents - GROUPS, size)]
        for group in range(GROUPS)
    ]
    positions = np.linspace(0, valid.documents - 1, size)
    validation = [valid.beginning(int(position), LONGEST) for position in positions]
    width = 1 + max(int(document.max(initial=0)) for group in (*groups, validation) for document in group)
    counts = np.array([_counts(group, width) for group in groups])
    total = counts.sum(0)
    within = [_divergence(one, total - one) for one in counts]
    # As in `within`, compare with all groups but one, so that both compare equally many documents.
    other = float(np.mean([_divergence(_counts(validation, width), total - one) for one in counts]))
    # If all groups have the same token frequencies, `within` is 0 and cannot be a divisor.
    return other / max(within) if max(within) > 1e-9 else None


def _all_end(source: Source) -> bool:
    """Return whether evenly spread documents of a split all end with the same token."""
    data, last = source.data, set()
    for number in np.linspace(0, source.documents - 1, DOCUMENTS).astype(int).tolist():
        end = data.token_offset(source.first_document + number + 1)
        last.update(data.read(max(end - 1, 0), end).tolist())
    return len(last) == 1


def _counts(documents: list[np.ndarray], width: int) -> np.ndarray:
    return sum((np.bincount(document, minlength=width) for document in documents), np.zeros(width, np.int64))


def _divergence(p: np.ndarray, q: np.ndarray) -> float:
    """Return the Jensen-Shannon divergence of two histograms, in nats."""
    p, q = p / max(p.sum(), 1), q / max(q.sum(), 1)
    middle = (p + q) / 2
    return sum(float((one[one > 0] * np.log(one[one > 0] / middle[one > 0])).sum()) / 2 for one in (p, q))
