"""Memory for gathered weights on an emulated cluster: bytes counted at a node's network card."""

from statistics import median

import pytest

from tools.bench.resident import INT8, STAGE_2, STAY, form, measure

pytestmark = [pytest.mark.netlab, pytest.mark.soak, pytest.mark.timeout(900)]


def test_bytes_follow_the_memory_and_losses_do_not() -> None:
    found, room = measure(rounds=1, turn=1, rate=None)
    sent = {name: median(one["sent"]) / room.weights for name, one in found.items()}
    for stay in STAY:
        assert sent[f"C = {stay}"] == pytest.approx(form(stay), rel=0.02)
    assert sent["C = 6"] <= 0.75 * sent["C = 1"]
    assert sent["C = 12"] == pytest.approx(sent[STAGE_2], rel=0.01)
    for suffix in ("", INT8):
        curves = [found[f"C = {stay}{suffix}"]["losses"] for stay in STAY]
        assert curves[0]
        assert all(curve == curves[0] for curve in curves)
