"""Threads spin on cores of their own, and sleep where other programs use these cores."""

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

import psutil
import pytest
from llmtrain.cli.main import main
from llmtrain.errors import BadInputError
from llmtrain.inference import open as opened
from llmtrain.launch.waiting import BRIEF, set_waiting, taken_cores
from llmtrain.start import run as start

from tests.tiny import write_corpus


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
def test_threads_sleep_on_busy_cores() -> None:
    environment: dict[str, str] = {}
    assert "the machine is busy: other programs use 0.9 of its 2 cores" in (set_waiting(environment, ranks=1) or "")
    assert environment == {"GOMP_SPINCOUNT": BRIEF}


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("chosen", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}, {"OMP_NUM_THREADS": "1"}])
def test_what_the_user_has_set_stays(chosen: dict[str, str]) -> None:
    environment = dict(chosen)
    assert set_waiting(environment, ranks=2) is None
    assert environment == chosen


def test_threads_spin_on_idle_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval, percpu: [0.0] * 1024)
    environment: dict[str, str] = {}
    assert set_waiting(environment, ranks=1) is None
    assert environment == {}


def test_it_is_decided_before_torch_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch loads libgomp, which reads the environment once."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "set", 20)
    Path("tiny.yaml").write_text("{model: {preset: gpt2-1m}, data: {path: set}}")
    ranks = list[int]()

    def load_torch(place: object) -> int:
        raise BadInputError("torch is loaded")

    monkeypatch.setattr(start, "set_waiting", lambda environment, count: ranks.append(count))
    monkeypatch.setattr(start, "_gpus", load_torch)
    for nproc in (None, 2):
        with pytest.raises(BadInputError, match="torch is loaded"):
            start.start("tiny.yaml", [], nproc, dry_run=False)
    assert ranks == [1, 2]


@pytest.mark.parametrize("words", [("eval",), ("generate", "--prompt", "a")])
def test_commands_that_compute_with_a_model_decide_before_torch_is_loaded(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decided = list[int]()

    def decide(environment: MutableMapping[str, str], ranks: int) -> str:
        assert environment is os.environ
        decided.append(ranks)
        return "threads do not spin"

    monkeypatch.setattr(opened, "set_waiting", decide)
    # The import of what imports torch fails.
    monkeypatch.setitem(sys.modules, "llmtrain.inference.trained", None)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").touch()
    with pytest.raises(ImportError):
        main([*words, str(tmp_path)])
    assert decided == [1]
