"""The recipe's `data` section."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

from pydantic import Field

from llmtrain_data.bounds import MAX_WEIGHT, SequenceLength, Weight

Shares = Annotated[
    tuple[Weight, Weight, Weight], Field(description="shares of training, validation and test such as [95, 5, 0]")
]


Blend = str | list[str | Weight]
"""The prefix of a prepared set, or `[weight, prefix, weight, prefix, ...]`."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The training data.

    path: prefix of a prepared `.bin/.idx` pair, or a blend `[weight, prefix, weight, prefix, ...]`.
    validation: prefix or blend whose documents validate, all of them; null takes the validation documents of `path`.
    tokenizer: folder of a Hugging Face tokenizer; `model.vocab: auto` takes its size.
    sequence_length: tokens per sample.
    split: shares of the documents of `path` for training, validation and test; with `validation`, those of the second
    share train too.
    accept_changed: allow resuming on other data than the checkpoint was trained on.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    path: Blend
    validation: Blend | None = None
    tokenizer: str | None = None
    sequence_length: SequenceLength = 1024
    split: Shares = (98.0, 1.0, 1.0)
    accept_changed: bool = False

    def __post_init__(self) -> None:
        if not (0 <= min(self.split) <= max(self.split) <= MAX_WEIGHT and self.split[0] > 0):
            raise ValueError(
                f"split is {list(self.split)}; expected shares from 0 to {MAX_WEIGHT:,}, and a training share above 0"
            )
        self.sets()

    @property
    def shares(self) -> tuple[float, float, float]:
        """Shares of the documents of `path` for training, validation and test."""
        train, valid, test = self.split
        return self.split if self.validation is None else (train + valid, 0.0, test)

    @property
    def validates(self) -> bool:
        """Whether there is something to validate on."""
        return self.validation is not None or self.shares[1] > 0

    def all_of(self, path: Blend) -> Self:
        """Return the same for all documents of `path`, which are its training split."""
        return replace(self, path=path, validation=None, split=(1.0, 0.0, 0.0))

    def blend(self) -> list[tuple[float, str]]:
        """Return (weight, prefix) pairs of `path`; the weights sum to 1."""
        return _parts("path", self.path)

    def sets(self) -> list[tuple[str, str]]:
        """Return each prefix of `path` and `validation`, after its key. Raises ValueError on a malformed blend."""
        given = [("path", self.path), ("validation", self.validation)]
        return [(key, prefix) for key, blend in given if blend is not None for _, prefix in _parts(key, blend)]


def _parts(key: str, blend: Blend) -> list[tuple[float, str]]:
    if isinstance(blend, str):
        return [(1.0, blend)]
    weights, prefixes = blend[0::2], blend[1::2]
    well_formed = (
        len(blend) >= 2
        and len(weights) == len(prefixes)
        and all(isinstance(w, int | float) and 0 < w <= MAX_WEIGHT for w in weights)
        and all(isinstance(p, str) for p in prefixes)
    )
    if not well_formed:
        shown = str(blend) if len(str(blend)) <= 100 else f"a list of {len(blend)}"
        raise ValueError(
            f"{key} is {shown}; expected a blend [weight, prefix, weight, prefix, ...] with positive weights up to "
            f"{MAX_WEIGHT:,}"
        )
    total = sum(float(w) for w in weights)
    return [(float(w) / total, str(p)) for w, p in zip(weights, prefixes, strict=True)]
