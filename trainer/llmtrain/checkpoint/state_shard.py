"""The states in memory that a checkpoint saves and loads: ranges of flat units."""

from dataclasses import dataclass

import torch

from llmtrain.model.tensors import UnitSpec


@dataclass(frozen=True)
class StateShard:
    """The range `[start, end)` of one unit, in memory.

    states: by name (`master`, `m`, `v`), a one-dimensional fp32 tensor of `end - start` elements each; a save
    reads them, a load fills them in place.
    """

    unit: UnitSpec
    start: int
    end: int
    states: dict[str, torch.Tensor]
