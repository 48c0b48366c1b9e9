"""The dtype in which a checkpoint's model computes, and whether the memory holds its weights."""

import pytest
import torch
from llmtrain.errors import BadInputError
from llmtrain.inference import trained

GPU, CPU = True, False
RAN_IN_BF16, RAN_IN_FP16 = {"precision": {"compute": "bf16"}}, {"precision": {"compute": "fp16"}}


@pytest.mark.parametrize(
    ("asked", "recipe", "on_gpu", "found"),
    [
        ("auto", RAN_IN_BF16, GPU, torch.bfloat16),
        ("auto", RAN_IN_BF16, CPU, torch.float32),
        ("auto", RAN_IN_FP16, GPU, torch.float16),
        ("auto", RAN_IN_FP16, CPU, torch.float32),
        ("auto", {"precision": {"compute": ["fp16"]}}, GPU, torch.float32),
        ("auto", {}, GPU, torch.float32),
        ("fp32", RAN_IN_BF16, GPU, torch.float32),
        ("bf16", {}, CPU, torch.bfloat16),
        ("fp16", {}, CPU, torch.float16),
    ],
)
def test_dtype(asked: str, recipe: dict[str, object], on_gpu: bool, found: torch.dtype) -> None:
    assert trained._dtype(asked, recipe, on_gpu) == found  # type: ignore[arg-type]


def test_weights_that_the_memory_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "machine_memory", lambda swap: 32 * 2**30)
    trained._check_memory(24 * 2**30, 24 * 2**30)
    trained._check_memory(32 * 2**30, None)
    with pytest.raises(BadInputError, match=r"take 52\.0 GiB, and this machine has 32\.0 GiB; --dtype bf16 takes half"):
        trained._check_memory(52 * 2**30, None)
    with pytest.raises(BadInputError, match=r"take 52\.0 GiB, and this GPU has 24\.0 GiB; --dtype bf16 takes half"):
        trained._check_memory(52 * 2**30, 24 * 2**30)
