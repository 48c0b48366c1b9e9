"""Plans a blend: how many tokens and epochs of each prepared data set a run will train on."""

import json
import re
from dataclasses import asdict, dataclass

from llmtrain_data.config import DataConfig
from llmtrain_data.dataset import open_split
from llmtrain_data.errors import DataError
from llmtrain_data.output import json_text
from llmtrain_data.sample_order import whole_shares

COLUMNS = ("source", "share", "documents", "tokens", "drawn", "epochs")
MAX_TOKENS = 1e18
"""Limit of the number before the suffix K, M, B or T."""

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class BlendPart:
    """One source. share: fraction of the samples. available: tokens of its training split. drawn: tokens trained on."""

    prefix: str
    share: float
    documents: int
    available: int
    drawn: int
    epochs: float


@dataclass(frozen=True)
class BlendPlan:
    """A blend for a run of `tokens` tokens. yaml: the recipe's `data` section."""

    tokens: int
    parts: list[BlendPart]
    yaml: str

    def json(self) -> str:
        """Return the plan as one JSON object."""
        return json_text(asdict(self))

    def rows(self) -> list[tuple[str, ...]]:
        """Return one row per source; COLUMNS has the headings."""
        return [
            (
                part.prefix,
                f"{part.share:.2%}",
                f"{part.documents:,}",
                f"{part.available:,}",
                f"{part.drawn:,}",
                f"{part.epochs:.2f}",
            )
            for part in self.parts
        ]

    def advice(self) -> str | None:
        """Return a sentence about sources with too many epochs, None if there are none."""
        repeated = [part.prefix for part in self.parts if part.epochs > 4]
        return f"more than 4 epochs, and later epochs help little: {', '.join(repeated)}" if repeated else None


def plan_blend(words: list[str], tokens: str | None, sequence_length: int, split: str) -> BlendPlan:
    """Plan a blend given as `[weight] prefix ...`. Without weights, each source counts by its tokens.

    tokens: length of the run, such as `10B`; None: the sum of all sources' tokens. split: shares of training,
    validation and test, such as `98,1,1`. Raises DataError for an invalid argument or data set.
    """
    shares = _split(split)
    config = _config(words, sequence_length, shares)
    samples = open_split(config, "train")
    available = [source.token_count for source in samples.sources]
    # As the run samples them: a small source gets more than its weight.
    counts = whole_shares([source.weight for source in samples.sources])
    drawn = [count / sum(counts) for count in counts]
    total = _amount(tokens) if tokens else sum(available)
    parts = [
        BlendPart(
            prefix=source.data.prefix,
            share=share,
            documents=source.documents,
            available=size,
            drawn=round(share * total),
            epochs=round(share * total / size, 4),
        )
        for source, size, share in zip(samples.sources, available, drawn, strict=True)
    ]
    path = _plain(config.path) if isinstance(config.path, str) else f"[{', '.join(map(_plain, config.path))}]"
    yaml = f"data:\n  path: {path}\n  sequence_length: {sequence_length}\n"
    yaml += f"  split: [{', '.join(map(_plain, shares))}]\n"
    return BlendPlan(total, parts, yaml)


def _config(words: list[str], sequence_length: int, split: tuple[float, float, float]) -> DataConfig:
    path: list[str | float] = [word if _number(word) is None else float(word) for word in words]
    try:
        if all(isinstance(word, str) for word in path):
            sizes = [
                len(open_split(DataConfig(path=str(word), sequence_length=sequence_length, split=split), "train"))
                for word in path
            ]
            shares = [max(round(size / sum(sizes), 6), 1e-6) for size in sizes]
            path = [value for pair in zip(shares, path, strict=True) for value in pair]
        return DataConfig(path=path, sequence_length=sequence_length, split=split)
    except ValueError as error:
        raise DataError(str(error)) from error


def _split(text: str) -> tuple[float, float, float]:
    shares = [_number(word) for word in text.split(",")]
    if len(shares) != 3 or None in shares:
        raise DataError(f"--split is {text!r}; expected three shares, such as 98,1,1")
    train, valid, test = (float(share or 0) for share in shares)
    return train, valid, test


def _amount(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text, re.IGNORECASE)
    if match is None or not 0 < float(match[1]) < MAX_TOKENS:
        raise DataError(f"--tokens is {text!r}; expected a positive number of tokens, such as 300M or 10B")
    return round(float(match[1]) * UNITS[match[2].upper()])


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _plain(value: str | float) -> str:
    """Return a value as YAML that reads back as the same value."""
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() else repr(value)
    # A plain string with a slash is never a YAML keyword or number, such as true or 0x10.
    return value if re.fullmatch(r"[\w./~-]*/[\w./~-]*", value) else json.dumps(value, ensure_ascii=False)
