"""What autograd sees of weights that lie in a buffer pool."""

from types import SimpleNamespace
from typing import Any

import torch
from llmtrain.sharding.engine import Engine, _Reference


def test_a_write_to_other_weights_is_no_change_of_these() -> None:
    """Autograd refuses to save a tensor of which it counts a change meanwhile, in a forward pass within a backward
    pass too."""
    pool = torch.zeros(8)
    engine: Any = SimpleNamespace(_use=lambda unit: pool[:4])
    weight = Engine._unpack(engine, _Reference("a", 1, torch.Size((3,)), (1,)))
    changes = weight._version
    pool[4:].fill_(1.0)
    assert weight._version == changes
    assert weight.data_ptr() == pool[1:].data_ptr()
