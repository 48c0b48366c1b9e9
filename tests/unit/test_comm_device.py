"""The queries to a device, without a GPU."""

import pytest
import torch
from llmtrain.comm import device as device_module
from llmtrain.comm.device import (
    HostCopies,
    allocated_memory,
    device_of,
    forget_peak_memory,
    gpu_count,
    gpus,
    in_host_memory,
    is_cpu,
    synchronize,
    to_device,
    to_host,
)

CPU = torch.device("cpu")


def test_without_a_gpu_there_is_the_cpu() -> None:
    assert len(gpus()) == gpu_count()
    if not gpu_count():
        assert is_cpu(device_of(3))
    assert allocated_memory(CPU) == {}
    synchronize(CPU)
    forget_peak_memory(CPU)


def test_values_that_are_where_they_should_be_stay_there() -> None:
    values = torch.arange(3)
    assert to_device(values, CPU) is values
    assert to_host(values) is values


def test_what_is_on_a_gpu_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(3)
    monkeypatch.setattr(device_module, "in_host_memory", lambda tensor: False)
    assert to_device(values, torch.device("cuda")) is values


def test_host_copies_keep_their_memory() -> None:
    states = [torch.arange(3.0), torch.arange(5.0)]
    copies = HostCopies(states)
    assert [copy.tolist() for copy in copies.copies] == [[0.0] * 3, [0.0] * 5]
    copies.copy(states).synchronize()
    states[0].zero_()
    assert [copy.tolist() for copy in copies.copies] == [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0, 4.0]]
    assert all(map(in_host_memory, copies.copies))
    assert copies.fits(states)
    assert not copies.fits(states[:1])
    # All copies share one allocation, whose pages are mapped at once.
    assert len({copy.untyped_storage().data_ptr() for copy in copies.copies}) == 1
