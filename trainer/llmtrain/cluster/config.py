"""The recipe's `parallel` section."""

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the ranks share the work. data: replicas that each take a share of the batch (auto: all ranks)."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    data: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.data != "auto" and self.data < 1:
            raise ValueError(f"data is {self.data}; it must be at least 1, or auto")
