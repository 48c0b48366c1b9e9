"""The recipe's `data` section."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on.

    path: prefix of a prepared `.bin/.idx` pair, or a blend `[weight, prefix, weight, prefix, ...]`.
    tokenizer: folder of a Hugging Face tokenizer; it gives `model.vocab: auto` its size.
    sequence_length: tokens per sample.
    split: shares of the documents for training, validation and test.
    accept_changed: resume on other data than the checkpoint was trained on; otherwise that is refused.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    path: str | list[str | float]
    tokenizer: str | None = None
    sequence_length: int = 1024
    split: tuple[float, float, float] = (98.0, 1.0, 1.0)
    accept_changed: bool = False

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise ValueError(f"sequence_length is {self.sequence_length}; it must be at least 1")
        if min(self.split) < 0 or self.split[0] <= 0:
            raise ValueError(f"split is {list(self.split)}; shares must not be negative and training needs one")
        self.blend()

    def blend(self) -> list[tuple[float, str]]:
        """Return (weight, prefix) pairs; the weights sum to 1. Raises ValueError on a malformed blend."""
        if isinstance(self.path, str):
            return [(1.0, self.path)]
        weights, prefixes = self.path[0::2], self.path[1::2]
        well_formed = (
            len(self.path) >= 2
            and len(weights) == len(prefixes)
            and all(isinstance(w, int | float) and w > 0 for w in weights)
            and all(isinstance(p, str) for p in prefixes)
        )
        if not well_formed:
            raise ValueError(
                f"path is {self.path}; a blend is written [weight, prefix, weight, prefix, ...] with positive weights"
            )
        total = sum(float(w) for w in weights)
        return [(float(w) / total, str(p)) for w, p in zip(weights, prefixes, strict=True)]
