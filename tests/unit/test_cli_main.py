"""Errors become a sentence on stderr and an exit code."""

import signal
import tomllib
from pathlib import Path

import pytest
import torch
from llmtrain.__main__ import program
from llmtrain.cli import main as module
from llmtrain.errors import BadInputError, PreemptedError, RunFailedError
from llmtrain_data.errors import DataError


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (BadInputError("key is 3"), 2, "key is 3"),
        (DataError("no such file"), 2, "no such file"),
        (RunFailedError("rank 1 is gone"), 1, "rank 1 is gone"),
        (PreemptedError("saved\nand stopped"), 75, "saved and stopped"),
        (OSError(28, "No space left on device", "runs/a"), 1, "runs/a: No space left on device"),
        (MemoryError(), 1, "doctor ran out of memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (BadInputError(f"key is {'x' * 10_000}; expected y"), 2, f"key is {'x' * 743} ... {'x' * 738}; expected y"),
        (BadInputError("a \x1b[31mred\u202e path"), 2, "a \\x1b[31mred\\u202e path"),
    ],
)
def test_errors_become_codes(
    error: BaseException,
    code: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def doctor() -> None:
        raise error

    monkeypatch.setattr("llmtrain.cli.doctor.doctor", doctor)
    assert module.main(["doctor"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"llmtrain: {sentence}\n"


def test_a_run_that_needs_too_much_memory_says_what_needs_less(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only torch's errors about memory become a sentence; its other errors are bugs."""

    def start(*given: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")

    monkeypatch.setattr("llmtrain.start.run.start", start)
    assert module.main(["run", "x"]) == 1
    assert capsys.readouterr().err == (
        "llmtrain: run ran out of memory; a smaller train.microbatch or model needs less, or state the card's memory "
        "in cluster.accelerator.memory, which auto fills\n"
    )
    monkeypatch.setattr("llmtrain.start.run.start", lambda *given: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        module.main(["run", "x"])


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("eval", "a smaller --microbatch or --sequence-length needs less"),
        ("generate", "a shorter --prompt or a smaller --max-tokens needs less"),
    ],
)
def test_other_commands_that_need_too_much_memory(
    command: str, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        raise MemoryError

    monkeypatch.setattr(f"llmtrain.cli.{command}.{command}", run)
    assert module.main([command]) == 1
    assert capsys.readouterr().err == f"llmtrain: {command} ran out of memory; {advice}\n"


@pytest.mark.parametrize(("ended", "code"), [(None, 7), (KeyboardInterrupt(), 130)])
def test_the_program_ends_without_a_traceback(
    ended: BaseException | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds also if the program is interrupted before it reads the command line, or at its end."""

    def main() -> int:
        if ended is not None:
            raise ended
        return 7

    monkeypatch.setattr(module, "main", main)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert program() == code
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"llmtrain": f"{program.__module__}:{program.__name__}"}


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def doctor() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("llmtrain.cli.doctor.doctor", doctor)
    with pytest.raises(ZeroDivisionError):
        module.main(["doctor"])


def test_without_arguments_it_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert module.main([]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in (*module.COMMANDS, *module.GROUPS))
