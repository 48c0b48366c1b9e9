"""Whether a validation split is of the kind that a run trains on, and large enough to tell.

Splits are contiguous ranges of documents, so a corpus that is ordered by domain has one domain last, and validates on
it.
"""

import numpy as np

from llmtrain_data.dataset import Samples, Source

FEWEST = 20
"""Documents of a validation split below which its loss says more of them than of the model."""

GROUPS, PLACES, LONGEST = 8, 64, 1024
"""Groups of training documents that are compared, documents of each, and tokens of a document that are looked at."""

FARTHER = 1.6
"""How many times as far from the training documents as the farthest group of them another domain is."""


def validation_warnings(training: Samples, validation: Samples) -> list[str]:
    """Return a sentence for each set whose validation split says little of its training split. Reads at most 0.6 Mi
    tokens of a set, always the same ones."""
    found = []
    for train, valid in zip(training.sources, validation.sources, strict=True):
        prefix = valid.data.prefix
        if valid.documents < FEWEST:
            found.append(
                f"the validation split of {prefix} has fewer than {FEWEST} documents ({valid.documents}), so that its "
                "loss depends on which they are; give it more by a larger second share in data.split"
            )
        elif (times := distance_ratio(train, valid)) is not None and times > FARTHER:
            found.append(
                f"the validation split of {prefix} is of another domain than its training split: the frequencies of "
                f"its tokens are {times:.1f} times as far from those of training as any group of as many training "
                "documents; prepare the data with its documents shuffled"
            )
    return found


def distance_ratio(train: Source, valid: Source) -> float | None:
    """Return how many times as far validation documents are from training documents as the farthest of some groups of
    as many training documents is from the others.

    None where there are too few documents, these are all alike, or they do not all end with the same token, as
    documents do: pieces of one text are like their neighbours, and nothing tells that apart.

    The distance is the Jensen-Shannon divergence of token frequencies. Groups of as many documents measure how far
    apart documents of one domain are, and how much of that is chance. Each group has one of the documents that lie side
    by side at places spread evenly, so that all groups have the same domains, in whatever order these are.
    """
    if not (_all_end(train) and _all_end(valid)):
        return None
    size = min(PLACES, valid.documents, train.documents // GROUPS)
    if size < FEWEST:
        return None
    held = [
        [train.beginning(int(first) + group, LONGEST) for first in np.linspace(0, train.documents - GROUPS, size)]
        for group in range(GROUPS)
    ]
    # One of each part of the split, and not always at the same place of it.
    places = np.linspace(0, valid.documents - 1, size)
    asked = [valid.beginning(int(place), LONGEST) for place in places]
    width = 1 + max(int(document.max(initial=0)) for group in (*held, asked) for document in group)
    counts = np.array([_counts(group, width) for group in held])
    everything = counts.sum(0)
    own = [_divergence(one, everything - one) for one in counts]
    # Against as many groups as the others were.
    other = float(np.mean([_divergence(_counts(asked, width), everything - one) for one in counts]))
    # Documents that are all alike are at no distance that others could be compared to.
    return other / max(own) if max(own) > 1e-9 else None


def _all_end(source: Source) -> bool:
    """Return whether documents spread over a split all end with the same token."""
    data, last = source.data, set()
    for number in np.linspace(0, source.documents - 1, PLACES).astype(int).tolist():
        end = data.token_offset(source.first_document + number + 1)
        last.update(data.read(max(end - 1, 0), end).tolist())
    return len(last) == 1


def _counts(documents: list[np.ndarray], width: int) -> np.ndarray:
    return sum((np.bincount(document, minlength=width) for document in documents), np.zeros(width, np.int64))


def _divergence(p: np.ndarray, q: np.ndarray) -> float:
    """Return the Jensen-Shannon divergence of two counts, in nats."""
    p, q = p / max(p.sum(), 1), q / max(q.sum(), 1)
    middle = (p + q) / 2
    return sum(float((one[one > 0] * np.log(one[one > 0] / middle[one > 0])).sum()) / 2 for one in (p, q))
