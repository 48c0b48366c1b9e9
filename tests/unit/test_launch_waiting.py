"""Threads spin on cores of their own, and sleep where other programs use these cores."""

import os

import psutil
import pytest
from llmtrain.launch.waiting import BRIEF, set_waiting, taken_cores


@pytest.mark.parametrize(
    ("threads", "used", "taken"),
    [
        (2, [0.0, 0.0], 0.0),
        (2, [0.1, 0.2], 0.0),
        (2, [1.0, 0.0], 1.0),
        (2, [0.5, 0.5], 1.0),
        (8, [1.0] + [0.0] * 15, 0.0),
        (16, [1.0] + [0.0] * 15, 1.0),
    ],
)
def test_other_programs_take_cores_that_threads_need(threads: int, used: list[float], taken: float) -> None:
    assert taken_cores(threads, used) == taken


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of which this process may use two cores, and others use one of them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2})
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval, percpu: [0.0, 90.0, 0.0])


@pytest.mark.usefixtures("busy")
def test_threads_sleep_on_busy_cores(capsys: pytest.CaptureFixture[str]) -> None:
    environment: dict[str, str] = {}
    set_waiting(environment, ranks=1)
    assert environment == {"GOMP_SPINCOUNT": BRIEF}
    assert "other programs use 0.9 of 2 cores" in capsys.readouterr().err


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("chosen", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}, {"OMP_NUM_THREADS": "1"}])
def test_what_the_user_has_set_stays(chosen: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    environment = dict(chosen)
    set_waiting(environment, ranks=2)
    assert environment == chosen
    assert capsys.readouterr().err == ""


def test_threads_spin_on_idle_cores(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval, percpu: [0.0] * 1024)
    environment: dict[str, str] = {}
    set_waiting(environment, ranks=1)
    assert environment == {}
    assert capsys.readouterr().err == ""
