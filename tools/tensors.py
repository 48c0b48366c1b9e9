"""The tensors of an operator's argument."""

from typing import Any

from torch import Tensor


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of an argument, or of a result: one, those of a list, or none."""
    if isinstance(value, Tensor):
        return [value]
    return [one for one in value if isinstance(one, Tensor)] if isinstance(value, list | tuple) else []
