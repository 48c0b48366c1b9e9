"""Memory for gathered weights changes what ranks send, and nothing that they compute."""

import pytest
import torch

from tests.ranks.harness import Case, Trained
from tests.ranks.strategies import SECOND

# From little more than one block, of 49,664 bytes, to room for all units.
BUDGETS = (50_000, 0, 110_000, 150_000, 10**9)
SHARDED = {
    "plain": ("zero.stage=3",),
    "secondary": ("zero.stage=3", "zero.secondary=2"),
    "rounded secondary": ("zero.stage=3", "zero.secondary=2", SECOND),
}
CASES = {
    name: [Case(4, (*keys, f"zero.resident={budget}"), node=2, accumulation=4) for budget in BUDGETS]
    for name, keys in SHARDED.items()
}


@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases], ids=str)
def test_trains(case: Case, trained: Trained) -> None:
    assert trained(case).curve


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_the_memory(name: str, trained: Trained) -> None:
    first, *others = (trained(case) for case in CASES[name])
    for other in others:
        assert other.curve == first.curve
        assert all(torch.equal(state, other.states()[key]) for key, state in first.states().items())


@pytest.mark.parametrize("name", CASES)
def test_more_memory_sends_fewer_bytes(name: str, trained: Trained) -> None:
    """At most as many with each larger budget, and all units once with room for all of them."""
    results = [trained(CASES[name][place]) for place in (0, 2, 3, 4)]
    sent = [sum(result.rows[5]["comm_sent_bytes"].values()) for result in results]
    assert sent == sorted(sent, reverse=True)
    assert sent[-1] < sent[0]
    gathered = results[-1].rows[5]["comm_bytes"]["weights"]["all_gather"]
    assert gathered == trained(CASES["plain"][-1]).rows[5]["comm_bytes"]["weights"]["all_gather"]


@pytest.mark.parametrize("keys", [(), ("quantize.weights=int8",)], ids=str)
def test_a_copy_that_is_not_rounded_changes_no_result(keys: tuple[str, ...], trained: Trained) -> None:
    """So `zero.resident: auto` may choose one."""
    stage3 = ("zero.stage=3", "zero.resident=0", *keys)
    whole, copied = (trained(Case(4, (*stage3, *more), node=2, accumulation=4)) for more in ((), ("zero.secondary=2",)))
    assert copied.curve == whole.curve
    assert all(torch.equal(state, copied.states()[key]) for key, state in whole.states().items())
