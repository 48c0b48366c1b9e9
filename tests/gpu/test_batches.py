"""The reader of batches, on the CPU and on a GPU: every batch in its turn, each copied before it is computed with."""

import threading
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.device import to_host
from llmtrain.comm.ranks import Ranks
from llmtrain.plan.facts import Device, Facts
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.prepare import check_and_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.training.batches import BatchReader
from llmtrain_data.dataset import Samples, open_split
from llmtrain_data.errors import DataError

from tests.tiny import write_corpus

RECIPE = """
model: {{family: gpt2, layers: 1, hidden: 16, heads: 2, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: 6, global_batch: 8, microbatch: 2}}
optimizer: {{warmup: 1}}
"""
# A machine with a GPU has no time for the cases that others run.
HERE: Device = "cuda" if torch.cuda.is_available() else "cpu"


class Noted(Samples):
    """Samples that note the positions read, and fail at one of them. begun: set by the read of the second batch."""

    def __init__(self, samples: Samples, fails: int | None = None) -> None:
        super().__init__(samples.sources, samples.sequence_length)
        self.read: list[int] = []
        self.begun, self._fails = threading.Event(), fails

    def batch(self, seed: int, first: int, count: int) -> np.ndarray:
        """See Samples."""
        self.read.append(first)
        if first >= 8:
            self.begun.set()
        if first == self._fails:
            raise DataError("damaged")
        return super().batch(seed, first, count)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    write_corpus(tmp_path / "set", 40)
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(folder=tmp_path))
    return check_and_plan(load_recipe(str(tmp_path / "tiny.yaml")), Facts(world=1, device="cpu"))


def rank(device: str, place: int = 0, degree: int = 1) -> Ranks:
    return Ranks(place, 0, Layout({Axis.DATA: degree}), torch.device(device))


@pytest.fixture(params=[HERE])
def device(request: pytest.FixtureRequest) -> Device:
    return cast(Device, request.param)


@pytest.mark.parametrize("place", [0, 1])
def test_each_batch_in_its_turn(place: int, plan: Plan, device: Device) -> None:
    """The computation has the batch before still to do: it must find the old values, and the next call the new ones."""
    samples = Noted(open_split(plan.data, "train", plan.model.vocab))
    reader, weights, sums = BatchReader(samples, plan, rank(device, place, 2)), torch.rand(512, 512, device=device), []
    for number in range(6):
        rows = reader.take(8 * number, more=number < 5)
        assert rows.device.type == device
        for _ in range(20):
            weights = weights @ weights / 256
        sums.append(rows + 0)
    reader.close()
    assert samples.read == [8 * number + 4 * place for number in range(6)]
    for number, found in enumerate(sums):
        assert np.array_equal(to_host(found).numpy(), Samples.batch(samples, plan.seed, 8 * number + 4 * place, 4))


def test_the_next_batch_is_read_before_it_is_taken(plan: Plan, device: Device) -> None:
    samples = Noted(open_split(plan.data, "train", plan.model.vocab))
    reader = BatchReader(samples, plan, rank(device))
    reader.take(0, more=True)
    assert samples.begun.wait(60)
    reader.close()
    assert samples.read == [0, 8]


def test_a_batch_elsewhere_is_read_when_it_is_taken(plan: Plan, device: Device) -> None:
    samples = Noted(open_split(plan.data, "train", plan.model.vocab))
    reader = BatchReader(samples, plan, rank(device))
    reader.take(0, more=True)
    rows = to_host(reader.take(24, more=False))
    reader.close()
    assert np.array_equal(rows.numpy(), Samples.batch(samples, plan.seed, 24, 8))
    assert samples.read == [0, 8, 24]


def test_damage_is_told_by_the_call_that_takes_the_batch(plan: Plan, device: Device) -> None:
    reader = BatchReader(Noted(open_split(plan.data, "train", plan.model.vocab), fails=16), plan, rank(device))
    reader.take(0, more=True)
    reader.take(8, more=True)
    with pytest.raises(DataError, match="damaged"):
        reader.take(16, more=True)
    reader.close()


def test_damage_of_a_batch_that_is_not_taken_is_not_told(plan: Plan, device: Device) -> None:
    reader = BatchReader(Noted(open_split(plan.data, "train", plan.model.vocab), fails=8), plan, rank(device))
    reader.take(0, more=True)
    reader.close()
