"""The benchmark of a GPU's kernels, rehearsed on a CPU with small inputs. Nothing is compared in time."""

from math import isfinite

import pytest
import torch

from tools.bench import gpu_kernels


def test_every_kernel_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"WIDTH": 64, "HEADS": 2, "CHANNELS": 16, "SEQUENCE": 32, "VOCAB": 128}
    for name, size in sizes.items():
        monkeypatch.setattr(gpu_kernels, name, size)
    given = gpu_kernels.Given(1, torch.device("cpu"))
    found = list(gpu_kernels.rows(given))
    assert [row[4] for row in found[:1]] == [row[6] for row in found[1:2]] == ["1.00"]
    assert len({row[0] for row in found}) == len(found) > 15
    for _, milliseconds, noise, *rates in found:
        assert isfinite(float(milliseconds))
        assert float(noise) >= 0
        assert sum(bool(rate) for rate in rates) == 2
