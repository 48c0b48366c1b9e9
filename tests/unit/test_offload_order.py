"""Which bucket a thread steps next."""

from collections import deque
from dataclasses import dataclass
from typing import Any, cast

from llmtrain.offload.stepper import _Ahead, _Queue
from llmtrain_kernels.adamw.step import AdamWStep

NUMBERS = AdamWStep(step=1, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


@dataclass
class Computed:
    """Stands for the event of a unit's gradients."""

    passed: bool = False

    def query(self) -> bool:
        return self.passed


@dataclass(frozen=True)
class Work:
    bucket: int
    computed: Computed


@dataclass(frozen=True)
class Bucket:
    work: Work


def test_gradients_that_the_gpu_has_not_computed_are_not_waited_for() -> None:
    """The host has added all units when the GPU has computed the gradients of the first of them."""
    queue, computed = _Queue(), [Computed(), Computed(), Computed()]
    for unit, event in enumerate(computed):
        buckets = (Bucket(Work(10 * unit + number, event)) for number in range(3))
        queue.ahead.append(deque(_Ahead(cast(Any, one), NUMBERS) for one in buckets))

    def taken() -> int:
        job = queue.next()
        assert isinstance(job, _Ahead)
        return job.work.bucket

    # The next one to come, then those of the unit that came last.
    assert taken() == 0
    computed[0].passed = True
    assert taken() == 1
    computed[1].passed = True
    assert [taken(), taken(), taken()] == [10, 11, 12]
    assert taken() == 2
    assert taken() == 20
    assert [job.work.bucket for job in queue.stepped_ahead.values()] == [0, 1, 10, 11, 12, 2, 20]
