"""An error names what tensor parallelism cannot shard, before anything starts."""

from dataclasses import replace

import pytest
from llmtrain.cluster.parallel import ParallelConfig
from llmtrain.model.config import GPTConfig
from llmtrain.model.presets import PRESETS
from llmtrain.plan.resolve.tensor_check import tensor_problems

LLAMA = PRESETS["llama-1m"]  # 4 heads, 2 key/value heads, ffn 384


@pytest.mark.parametrize(
    ("config", "tensor", "sequence_length", "named"),
    [
        (LLAMA, 8, 256, ["parallel.tensor is 8", "model.heads is 4", "1 or 2"]),
        (LLAMA, 4, 256, ["parallel.tensor is 4", "model.kv_heads is 2", "1 or 2"]),
        (replace(LLAMA, ffn=383), 2, 256, ["model.ffn is 383", "take 1"]),
        (replace(LLAMA, vocab=1), 2, 256, ["model.vocab is 1"]),
        (LLAMA, 2, 255, ["data.sequence_length is 255", "parallel.tensor (2)"]),
    ],
)
def test_problems(config: GPTConfig, tensor: int, sequence_length: int, named: list[str]) -> None:
    said = tensor_problems(config, ParallelConfig(tensor=tensor, sequence=True), sequence_length)
    assert said is not None
    assert all(part in said for part in named), said


@pytest.mark.parametrize(
    ("config", "parallel", "sequence_length"),
    [
        (LLAMA, ParallelConfig(tensor=2, sequence=True), 256),
        (LLAMA, ParallelConfig(tensor=2), 255),
        (LLAMA, ParallelConfig(tensor=1, sequence=True), 255),
        (replace(LLAMA, vocab=61), ParallelConfig(tensor=2), 256),
    ],
)
def test_fits(config: GPTConfig, parallel: ParallelConfig, sequence_length: int) -> None:
    assert tensor_problems(config, parallel, sequence_length) is None
