"""Bytes that leave a node in an optimizer step, counted at its network card, against closed forms: ours and the
papers'.

The forms are in `tools/bench/wire.py`, each with its paper's section, in units of M, the bytes of all weights in 16
bits.
"""

from collections.abc import Callable
from functools import cache

import pytest

from tools.bench.wire import Sent, Setting, measure, strategies

pytestmark = [pytest.mark.netlab, pytest.mark.timeout(900)]

ONCE, MANY = 1, 3
SMALL, LARGE = (2, 2), (2, 4)
# At most this share of a card's bytes is headers, acknowledgements and barriers.
HEADERS = 0.03
# At most this share of a card's bytes is not in the plan.
PLANNED = 0.02
Measured = Callable[[tuple[int, int]], dict[tuple[str, int], Sent]]


@pytest.fixture(scope="session")
def measured() -> Measured:
    """Return the bytes that every strategy sent in a cluster of a shape; trains each shape once."""

    @cache
    def of_shape(shape: tuple[int, int]) -> dict[tuple[str, int], Sent]:
        return measure(*shape, (ONCE, MANY))

    return of_shape


SHAPES = [SMALL, pytest.param(LARGE, marks=pytest.mark.soak)]
EACH = [
    pytest.param(shape, name, count, id=f"{shape[0]}x{shape[1]}: {name} x{count}", marks=marks)
    for shape, marks in ((SMALL, ()), (LARGE, pytest.mark.soak))
    for name in strategies(*shape)
    for count in (ONCE, MANY)
]


@pytest.mark.parametrize(("shape", "name", "count"), EACH)
def test_what_each_strategy_sends(shape: tuple[int, int], name: str, count: int, measured: Measured) -> None:
    sent, strategy, setting = measured(shape)[name, count], strategies(*shape)[name], Setting(*shape, count)
    assert sent.metered <= sent.counted <= sent.metered * (1 + HEADERS)
    assert sent.planned <= sent.counted <= sent.planned * (1 + PLANNED)
    assert sent.counted == pytest.approx(strategy.ours(setting), rel=0.05)
    assert strategy.ours(setting) <= strategy.paper(setting)
    assert sent.counted <= strategy.paper(setting) * (1 + HEADERS)


@pytest.mark.parametrize("shape", SHAPES)
def test_microbatches_of_topo_and_mics_send_nothing_between_nodes(shape: tuple[int, int], measured: Measured) -> None:
    """Gathers and the first reduction stay inside a node, so the bytes between nodes do not depend on the
    microbatches."""
    found = measured(shape)
    inside = [name for name in strategies(*shape) if name.startswith(("topo", "mics", "partition"))]
    assert len(inside) >= 3
    for name in inside:
        assert found[name, MANY].counted == pytest.approx(found[name, ONCE].counted, rel=0.01)


@pytest.mark.parametrize("shape", SHAPES)
def test_gathers_across_nodes_first_send_what_mics_says(shape: tuple[int, int], measured: Measured) -> None:
    """A hierarchical gather sends (p - k) M / p instead of (p - 1) M / p (section 3.3); the saving of a step's gathers
    is tested."""
    found, (nodes, local) = measured(shape), shape
    saved = found["stage 3, gathers in one ring", ONCE].counted - found["stage 3", ONCE].counted
    assert saved == pytest.approx(Setting(*shape, ONCE).gathers * (local - 1) / (nodes * local), rel=0.05)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_second_hop_sends_half_of_an_all_reduce(shape: tuple[int, int], measured: Measured) -> None:
    """If optimizer states are sharded over all ranks, the updated weights also cross once, (p - k) M / p; subtract
    these."""
    found, (nodes, local) = measured(shape), shape
    update = (nodes - 1) / nodes
    second_hop = found[f"partition ({local}, {local}, {nodes * local})", ONCE].counted - update
    assert second_hop == pytest.approx(found["mics", ONCE].counted / 2, rel=0.05)


@pytest.mark.parametrize("shape", SHAPES)
def test_zero_plus_plus_sends_a_quarter_of_zero_3(shape: tuple[int, int], measured: Measured) -> None:
    """3 M become 0.75 M in a step of one microbatch (ZeRO++, table 1); our ZeRO-3 sends less than 3 M, by one block."""
    assert measured(shape)["zero++", ONCE].counted == pytest.approx(3 / 4 * Setting(*shape, ONCE).hops, rel=0.05)
