"""Whatever a file holds, its reader reads it or refuses it in a sentence, within 5 s and 500 MB."""

import os
import signal
from pathlib import Path

import pytest

from tools.fuzz.cases import Case
from tools.fuzz.pool import case_of, run, summary
from tools.fuzz.targets import TARGETS, Target


@pytest.mark.parametrize("reader", TARGETS)
def test_inputs_of(reader: str, tmp_path: Path) -> None:
    case_of(TARGETS[reader], 2, 0)
    assert summary(list(run(TARGETS[reader], 2, range(100), tmp_path))) == []


@pytest.mark.soak
@pytest.mark.parametrize("reader", TARGETS)
def test_many_inputs_of(reader: str, tmp_path: Path) -> None:
    """FUZZ_COUNT: inputs of each reader. FUZZ_SEED: another one makes others."""
    count, seed = int(os.environ.get("FUZZ_COUNT", "1500")), int(os.environ.get("FUZZ_SEED", "1"))
    case_of(TARGETS[reader], seed, 0)
    assert summary(list(run(TARGETS[reader], seed, range(count), tmp_path))) == []


WHAT = {"1": "KeyError", "2": "ended the process with -9", "3": "MemoryError"}


def reads(case: Case) -> None:
    number = case.words[0]
    if number == "1":
        raise KeyError("x")
    if number == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    if number == "3":
        bytearray(10**9)
    if number == "4":
        raise OSError("refused")


def test_what_a_find_is(tmp_path: Path) -> None:
    """Else finding nothing would prove nothing."""
    target = Target("test", lambda random: Case({"x": b""}, [str(random.randrange(5))]), reads)
    words = [case_of(target, 0, index).words[0] for index in range(20)]
    assert {*words} == {*"01234"}
    found = list(run(target, 0, range(20), tmp_path))
    expected = [(index, WHAT[word]) for index, word in enumerate(words) if word in WHAT]
    assert [(find.index, find.what.partition(":")[0]) for find in found] == expected
    assert len({path.parent.parent for path in tmp_path.rglob("find.txt")}) == 3
