"""The fewest elements that a step gathers: against every choice of what stays, and against what the program gathers."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmtrain.cli.main import main
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.instructions import At, Gather
from llmtrain.plan.program.residency import NEVER, Units, UnitUse, next_events, reside
from llmtrain.plan.program.residency_bound import gather_gap, least_gathered
from llmtrain.plan.program.spec import ProgramSpec

from tests.unit.random_plans import RandomPlans


def events_of(uses: Sequence[str]) -> list[UnitUse]:
    return [UnitUse(at, unit) for unit in uses for at in (At.USE, At.DONE)]


def fewest(events: Sequence[UnitUse], sizes: dict[str, int], capacity: int) -> int:
    """Try every choice of units that stay whole."""
    following, found = next_events(events, At.USE), []
    gaps = [(place, following[place]) for place, one in enumerate(events) if one.at is At.DONE]
    gaps = [gap for gap in gaps if gap[1] != NEVER]
    uses = [(place, one.unit) for place, one in enumerate(events) if one.at is At.USE]
    every = sum(sizes[unit] for _, unit in uses)
    for choice in product((False, True), repeat=len(gaps)):
        stay = [gap for gap, stays in zip(gaps, choice, strict=True) if stays]
        if all(
            sizes[unit] + sum(sizes[events[done].unit] for done, use in stay if done < place < use) <= capacity
            for place, unit in uses
        ):
            found.append(every - sum(sizes[events[done].unit] for done, _ in stay))
    return min(found)


@settings(max_examples=150, deadline=None)
@given(st.text("abcd", min_size=1, max_size=9), st.integers(1, 4))
def test_equal_sizes_against_every_choice(uses: str, capacity: int) -> None:
    sizes, events = dict.fromkeys("abcd", 1), events_of(uses)
    assert least_gathered(events, Units(sizes), capacity) == fewest(events, sizes, capacity)


@settings(max_examples=150, deadline=None)
@given(
    st.text("abcd", min_size=1, max_size=9),
    st.fixed_dictionaries({name: st.integers(1, 5) for name in "abcd"}),
    st.integers(5, 14),
)
def test_unlike_sizes_never_below(uses: str, sizes: dict[str, int], capacity: int) -> None:
    events = events_of(uses)
    least = least_gathered(events, Units(sizes), capacity)
    assert least <= fewest(events, sizes, capacity)
    # Each unit is gathered once.
    assert least >= sum(sizes[unit] for unit in set(uses))
    issues, _ = reside(events, Units(sizes), capacity)
    gathered = sum(sizes[one.unit] for found in issues for one in found if isinstance(one, Gather))
    assert gathered >= least


def test_parts_of_a_unit_may_stay() -> None:
    # Between the uses of a, units of 2 and 3 elements pass: 2 of a's 4 elements stay in a memory of 5.
    assert least_gathered(events_of("abca"), Units({"a": 4, "b": 2, "c": 3}), 5) == 4 + 2 + 3 + 2


def test_random_plans_gather_no_less(tmp_path: Path) -> None:
    plans, gaps = RandomPlans(tmp_path, 3), list[float]()
    for _ in range(60):
        keys, plan = plans.next()
        for rank in {0, plan.grid.world - 1}:
            gap = gather_gap(Programs(ProgramSpec.of(plan, rank)))
            assert gap.gathered >= gap.least, keys
            gaps.append(gap.share)
    assert max(gaps) > 0


RECIPE = """
model: {family: llama, layers: 8, hidden: 64, heads: 8, vocab: 4096}
data: {path: set, sequence_length: 32}
train: {global_batch: 16, microbatch: 1}
cluster: {node: {ranks: 4}}
"""


@pytest.mark.parametrize(("resident", "expected"), [("0", True), ("1GB", False)])
def test_the_gap_is_printed_if_there_is_one(
    resident: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(RECIPE)
    assert main(["plan", "small.yaml", "zero.stage=3", f"zero.resident={resident}", "--program", "0"]) == 0
    assert ("above the bound of" in capsys.readouterr().out) == expected
