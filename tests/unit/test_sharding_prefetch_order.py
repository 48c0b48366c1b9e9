"""The units that a pass needs next."""

from llmtrain.sharding.prefetch_order import PrefetchOrder

FORWARD = ["embedding", "1", "2", "3", "head"]
PASS = [*FORWARD, "head", "3", "2", "1", *FORWARD]


def passed(order: PrefetchOrder, units: list[str]) -> list[list[str]]:
    """Run through a pass, and return the next two units after each unit."""
    order.start()
    found = []
    for unit in units:
        order.use(unit)
        found.append(order.ahead(2))
    return found


def test_nothing_is_known_of_a_first_pass() -> None:
    assert passed(PrefetchOrder(), PASS) == [[]] * len(PASS)


def test_units_ahead_are_named_once() -> None:
    """When the backward pass begins, the last units of the forward pass are the next ones."""
    order = PrefetchOrder()
    passed(order, PASS)
    ahead = dict(zip(range(len(PASS)), passed(order, PASS), strict=True))
    assert ahead[0] == ["1", "2"]
    assert ahead[3] == ["head", "3"]
    assert ahead[4] == ["head", "3"]
    assert ahead[5] == ["3", "2"]
    assert ahead[8] == ["embedding", "1"]
    assert ahead[12] == ["head"]
    assert ahead[13] == []


def test_another_order_is_recorded_from_where_it_differs() -> None:
    order = PrefetchOrder()
    passed(order, ["1", "2", "3"])
    assert passed(order, ["1", "3", "2"]) == [["2", "3"], [], []]
    assert passed(order, ["1", "3", "2"]) == [["3", "2"], ["2"], []]


def test_a_turn_is_not_passed_where_directions_are_told_apart() -> None:
    order = PrefetchOrder()
    for _ in range(2):
        order.start()
        for unit in ("1", "2"):
            order.use(unit)
        known = order.ahead(2), order.ahead(2, False), order.ahead(2, True)
        for unit in ("2", "1"):
            order.use(unit, backward=True)
    assert known == (["2", "1"], [], ["2", "1"])


def test_few_units_used_many_times_are_found_at_once() -> None:
    order = PrefetchOrder()
    for _ in range(2):
        order.start()
        for _ in range(10**4):
            order.use("1")
            assert order.ahead(2) in ([], ["1"])
