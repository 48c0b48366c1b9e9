"""The recipe's `data` section."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from llmtrain_data.bounds import MAX_WEIGHT, SequenceLength, Weight

Shares = Annotated[
    tuple[Weight, Weight, Weight], Field(description="shares of training, validation and test such as [95, 5, 0]")
]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The training data.

    path: prefix of a prepared `.bin/.idx` pair, or a blend `[weight, prefix, weight, prefix, ...]`.
    tokenizer: folder of a Hugging Face tokenizer; `model.vocab: auto` takes its size.
    sequence_length: tokens per sample.
    split: shares of the documents for training, validation and test.
    accept_changed: allow resuming on other data than the checkpoint was trained on.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    path: str | list[str | Weight]
    tokenizer: str | None = None
    sequence_length: SequenceLength = 1024
    split: Shares = (98.0, 1.0, 1.0)
    accept_changed: bool = False

    def __post_init__(self) -> None:
        if not (0 <= min(self.split) <= max(self.split) <= MAX_WEIGHT and self.split[0] > 0):
            raise ValueError(
                f"split is {list(self.split)}; expected shares from 0 to {MAX_WEIGHT:,}, and a training share above 0"
            )
        self.blend()

    def blend(self) -> list[tuple[float, str]]:
        """Return (weight, prefix) pairs; the weights sum to 1. Raises ValueError on a malformed blend."""
        if isinstance(self.path, str):
            return [(1.0, self.path)]
        weights, prefixes = self.path[0::2], self.path[1::2]
        well_formed = (
            len(self.path) >= 2
            and len(weights) == len(prefixes)
            and all(isinstance(w, int | float) and 0 < w <= MAX_WEIGHT for w in weights)
            and all(isinstance(p, str) for p in prefixes)
        )
        if not well_formed:
            shown = str(self.path) if len(str(self.path)) <= 100 else f"a list of {len(self.path)}"
            raise ValueError(
                f"path is {shown}; expected a blend [weight, prefix, weight, prefix, ...] with positive weights up to "
                f"{MAX_WEIGHT:,}"
            )
        total = sum(float(w) for w in weights)
        return [(float(w) / total, str(p)) for w, p in zip(weights, prefixes, strict=True)]
