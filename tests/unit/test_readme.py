"""What README shows of plans is what its commands print."""

import re
import shlex
from pathlib import Path

import pytest
from llmtrain.cli.main import main

README = Path(__file__).resolve().parents[2] / "README.md"
# An indented block that begins with the command, and goes on with lines that it prints.
SHOWN = re.compile(r"(?m)^    llmtrain (plan .*)\n\n((?:    .*\n|\n(?=    ))+)")


def test_plans_are_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """README may leave lines out where it has `...`."""
    found = SHOWN.findall(README.read_text(encoding="utf-8"))
    assert len(found) == 2
    for command, block in found:
        assert main(shlex.split(command)) == 0
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        shown = re.sub("(?m)^    ", "", block).rstrip().splitlines()
        wrong = [line for line in shown if line not in (*printed, "...")]
        assert not wrong, f"`llmtrain {command}` does not print {wrong[0]!r}; paste what it prints into README"
        expected = "".join(r"(.*\n)*" if line == "..." else re.escape(f"{line}\n") for line in shown)
        said = "".join(f"{line}\n" for line in printed)
        assert re.fullmatch(expected, said), f"README leaves lines of `llmtrain {command}` out without '...'"
