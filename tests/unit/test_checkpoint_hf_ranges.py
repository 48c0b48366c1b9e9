"""Ranks that start from a Hugging Face model read only what they hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llmtrain.checkpoint.convert import hf_weights
from llmtrain.checkpoint.convert.hf_weights import hf_ranges, hf_tensors
from llmtrain.cluster.layout import even_share
from llmtrain.model.hf_config import read_hf_config
from llmtrain.model.tensors import model_units, sliced_units
from safetensors import safe_open
from safetensors.torch import save_file

from tests.unit.test_checkpoint_convert import MODELS, hf_folder, weights


class Counted:
    """A tensor of a file. read: receives the numbers of elements that are read."""

    def __init__(self, stored: Any, read: list[int]) -> None:
        self._stored, self._read = stored, read
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

    def __getitem__(self, part: Any) -> torch.Tensor:
        values: torch.Tensor = self._stored[part]
        self._read.append(values.numel())
        return values


@pytest.mark.parametrize(("tensor", "data"), [(1, 1), (1, 5), (2, 1), (3, 4)])
@pytest.mark.parametrize("kind", MODELS)
def test_a_rank_reads_only_what_it_holds(
    tmp_path: Path, kind: str, tensor: int, data: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hf_folder(kind, tmp_path / "hf")
    save_file({name: values.bfloat16() for name, values in weights(source).items()}, source / "model.safetensors")
    config = read_hf_config(source)
    whole = {name: values.flatten() for name, values in hf_tensors(source, config)}
    read: list[int] = []

    @contextmanager
    def opened(path: Path, framework: str) -> Iterator[SimpleNamespace]:
        with safe_open(path, framework=framework) as file:
            yield SimpleNamespace(keys=file.keys, get_slice=lambda name: Counted(file.get_slice(name), read))

    monkeypatch.setattr(hf_weights, "safe_open", opened)
    for place, share, unit in product(range(tensor), range(data), range(len(model_units(config)))):
        spec = sliced_units(config, place, tensor)[unit]
        held = spec.tensor_ranges(*even_share(spec.numel, data, share))
        wanted = {one.name: (first, last) for one, first, last in held}
        read.clear()
        found = dict(hf_ranges(source, config, wanted))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], whole[name][slice(*wanted[name])]) for name in wanted)
        # A range is whole rows but for two ends.
        rows = sum(2 * (prod(one.shape[1:]) - 1) for one, _, _ in held)
        assert sum(read) <= sum(last - first for _, first, last in held) + rows
