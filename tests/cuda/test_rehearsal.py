"""Steps of every layout on a GPU, rehearsed without one: no race, one order of NCCL's calls, and one wait a step."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from llmtrain.plan.collective_buffers import LANE_CTAS, MESSAGE_CTAS

from tests.cuda.cases import CASES, NORM, REGISTERS, SUMMED
from tests.cuda.twins import FREED, RACES

STEPS = 2
# The first test waits for all rehearsals.
pytestmark = pytest.mark.timeout(1500)
Answer = Callable[[str, str], dict[str, Any]]


def test_there_are_many_layouts() -> None:
    assert len(CASES) >= 90


@pytest.mark.parametrize("case", CASES)
def test_memory_is_used_in_order(case: str, answer: Answer) -> None:
    """For any speed of streams and threads: what one writes and another uses has an order."""
    found = answer("cases", case)
    assert found["races"] == []
    assert found["early"] == []
    assert found["strays"] == []
    assert found["applied"] == STEPS


@pytest.mark.parametrize("case", CASES)
def test_no_number_is_rounded(case: str, answer: Answer) -> None:
    """Factors have 32 bits also where they multiply 16-bit gradients."""
    assert answer("cases", case)["rounded"] == []


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.world > 1])
def test_ranks_make_the_same_calls(case: str, answer: Answer) -> None:
    """In one order on each communicator, so that no rank waits for ever."""
    found = answer("cases", case)
    assert found["calls"] > 0
    assert found["disagreements"] == []


# Message-driven ranks that are rehearsed one by one take messages as early as none could be there.
ORDERED = [name for name, case in CASES.items() if case.world > 1 and "message-driven" not in str(case.keys)]


@pytest.mark.parametrize("case", ORDERED)
def test_calls_do_not_wait_for_each_other(case: str, answer: Answer) -> None:
    """Over all communicators together."""
    assert answer("cases", case)["deadlock"] == []


@pytest.mark.parametrize(
    ("case", "ctas"),
    [
        ("stage 3, 2 nodes", [LANE_CTAS]),
        ("zero++", [LANE_CTAS]),
        ("1f1b", [MESSAGE_CTAS]),
        ("1f1b, stage 3", [MESSAGE_CTAS, LANE_CTAS]),
    ],
)
def test_communicators_take_few_ctas(case: str, ctas: list[int], answer: Answer) -> None:
    """By purpose: what they leave computes."""
    assert answer("cases", case)["ctas"] == ctas


@pytest.mark.parametrize("case", ["stage 1", "stage 2", "stage 3", "zero++", "1f1b, stage 3"])
def test_what_runs_beside_the_computation_goes_first(case: str, answer: Answer) -> None:
    """Streams that collectives are queued on."""
    assert -1 in answer("cases", case)["priorities"]


@pytest.mark.parametrize("case", REGISTERS)
def test_what_ranks_send_is_registered(case: str, answer: Answer) -> None:
    """With the communicators of all gathers and reductions."""
    found = answer("cases", case)
    assert found["registered"] > 0
    assert found["left"]
    assert found["unregistered"] == []


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.pipeline > 1])
def test_messages_are_received_during_the_computation(case: str, answer: Answer) -> None:
    """On every rank, at least the second message of a channel in each step."""
    assert answer("cases", case)["beside"] >= STEPS


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_at_the_end_of_the_passes(case: str, answer: Answer) -> None:
    """Once a step. Offloaded activations have waits of their own, and buckets of gradients in files that the device
    steps one each."""
    found = answer("cases", case)
    assert Counter(found["waits"]) == Counter([NORM, *CASES[case].waits])
    # Sums that rest elsewhere are there once, after the passes.
    assert Counter[str](found["drained"]) - Counter([SUMMED]) == Counter(CASES[case].drained)
    assert found["pageable"] == []


@pytest.mark.parametrize("case", [name for name in CASES if "on the host" in name or "in files" in name])
def test_the_host_link_carries_what_is_planned(case: str, answer: Answer) -> None:
    """Each way, on each rank, in a step."""
    found = answer("cases", case)
    assert found["copied"] == found["planned"]
    if not (CASES[case].saves or CASES[case].checks):
        assert found["linked"] == found["planned"]
    assert any(down > 0 < up for down, up in found["copied"])


@pytest.mark.parametrize("twin", RACES)
def test_a_missing_wait_is_found(twin: str, answer: Answer) -> None:
    """The same step without one kind of synchronisation."""
    assert answer("twins", twin)["races"] != []


@pytest.mark.parametrize("twin", FREED)
def test_memory_that_is_freed_early_is_found(twin: str, answer: Answer) -> None:
    """Though its uses are in order."""
    found = answer("twins", twin)
    assert found["early"] != []
    assert found["races"] == []


@pytest.mark.parametrize("twin", ["pageable"])
def test_a_pageable_copy_is_found(twin: str, answer: Answer) -> None:
    """And the wait that it is."""
    found = answer("twins", twin)
    assert len(found["pageable"]) > 0
    assert len(found["waits"]) == 2


@pytest.mark.parametrize("twin", ["device"])
def test_a_thread_that_sets_no_device_is_found(twin: str, answer: Answer) -> None:
    """On the second GPU of a node, it would use the first."""
    assert answer("twins", twin)["strays"] != []


@pytest.mark.parametrize("twin", ["rounded"])
def test_a_rounded_number_is_found(twin: str, answer: Answer) -> None:
    """A factor of gradients, as a tensor without dimensions."""
    assert answer("twins", twin)["rounded"] != []


@pytest.mark.parametrize("twin", ["waits"])
def test_a_second_wait_is_found(twin: str, answer: Answer) -> None:
    """Each number that is read by itself."""
    assert len(answer("twins", twin)["waits"]) == 2


@pytest.mark.parametrize("twin", ["drained"])
def test_a_wait_for_a_thread_that_waits_for_the_device_is_found(twin: str, answer: Answer) -> None:
    """Once for each unit whose sum is on the host and goes over further links."""
    found = answer("twins", twin)
    assert len(found["drained"]) >= 3
    assert len(found["waits"]) == 1


@pytest.mark.parametrize("twin", ["order"])
def test_another_order_is_found(twin: str, answer: Answer) -> None:
    """One rank updates its units from the last to the first."""
    assert answer("twins", twin)["disagreements"] != []


@pytest.mark.parametrize("twin", ["deadlock"])
def test_calls_that_wait_for_each_other_are_found(twin: str, answer: Answer) -> None:
    """Though the ranks of each communicator agree: two of eight ranks sum over tied stages before they sum over their
    own stage."""
    found = answer("twins", twin)
    assert found["disagreements"] == []
    assert found["deadlock"] != []
