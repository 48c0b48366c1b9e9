"""The console's output: plain lines, a live line, quantities for people."""

import re
import time
from io import StringIO

import pytest
from llmtrain.telemetry.console import RunConsole, step_text
from llmtrain.telemetry.metrics import Row
from llmtrain_data import waiting
from llmtrain_data.output import Terminal
from llmtrain_data.waiting import Waiting


def console(terminal: bool) -> tuple[RunConsole, StringIO]:
    text = StringIO()
    return RunConsole(10, Terminal(file=text, force_terminal=terminal, width=60, color_system=None)), text


ROW: Row = {
    "step": 4, "loss": 2.5, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 12345.0, "mfu": None, "mfu_measured": 0.421,
    "skipped_steps": 0, "elapsed_s": 65.0,
}  # fmt: skip


def show(run: RunConsole) -> None:
    run.start("tiny [run]", [("model", "gpt2 [small]")], ["microbatch: 4", "data: 2"])
    run.progress(4, 65.0, 3600.0)
    run.logged(ROW, 3600.0)
    run.evaluation(4, "validation", 2.0, 7.389)
    run.warn("step 5 was skipped")


def test_plain_lines_where_there_is_no_terminal() -> None:
    run, text = console(terminal=False)
    show(run)
    run.end([("time", "1:05")])
    assert text.getvalue().splitlines() == [
        "run tiny [run]",
        "  model           gpt2 [small]",
        "  decided         microbatch: 4",
        "                  data: 2",
        "step 4/10  loss 2.5000  lr 1.00e-03  grad norm 1.00  12.3k tokens/s  42% of measured peak  "
        "elapsed 1:05  left 1:00:00",
        "step 4/10  validation loss 2.0000  perplexity 7.39",
        "warning: step 5 was skipped",
        "done",
        "  time                  1:05",
    ]


@pytest.mark.parametrize(
    ("mfu", "measured", "shown"),
    [(0.421, 0.6, "tokens/s  MFU 42.1%"), (None, 0.6, "tokens/s  60% of measured peak"), (None, None, "tokens/s")],
)
def test_utilisation_is_named_for_the_peak_that_it_is_of(mfu: float | None, measured: float | None, shown: str) -> None:
    assert step_text({**ROW, "mfu": mfu, "mfu_measured": measured}).endswith(shown)


def test_live_line_on_a_terminal() -> None:
    run, text = console(terminal=True)
    show(run)
    run.close()
    drawn = text.getvalue()
    # The output is one line, and a narrow terminal shows its beginning.
    lines = [line for line in drawn.splitlines() if "4/10  elapsed 1:05" in line]
    assert lines
    assert all(line.rstrip().endswith("\N{HORIZONTAL ELLIPSIS}") for line in lines)
    assert ", left 1:00:00  " in lines[0] or ", left 59:59  " in lines[0]
    # The live line is drawn again below other output.
    assert drawn.index("warning: step 5 was skipped") < drawn.rindex("4/10  elapsed 1:05")
    assert "step 4/10  loss" not in drawn


def test_live_line_of_a_wide_terminal() -> None:
    text = StringIO()
    run = RunConsole(10, Terminal(file=text, force_terminal=True, width=160, color_system=None))
    show(run)
    run.close()
    assert "loss 2.5000  lr 1.00e-03  grad norm 1.00  12.3k tokens/s  42% of measured peak" in text.getvalue()


def until(text: StringIO, words: str) -> bool:
    end = time.monotonic() + 20
    while words not in text.getvalue() and time.monotonic() < end:
        time.sleep(0.01)
    return words in text.getvalue()


def test_a_line_for_what_takes_long_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 0.1)
    text, doing = StringIO(), "opening the data"
    with Waiting(lambda: doing, Terminal(file=text)) as shown:
        assert until(text, "opening the data  (")
        doing = "loading the checkpoint: 10%"
        assert until(text, "loading the checkpoint: 10%  (")
        doing = ""
    assert not re.search(r"^ *\(", text.getvalue(), re.MULTILINE)
    shown.stop()
    with Waiting(lambda: "quick", Terminal(file=text)):
        pass
    with Waiting(lambda: "of another rank", Terminal(file=text), enabled=False):
        time.sleep(0.3)
    assert "quick" not in text.getvalue()
    assert "another" not in text.getvalue()


def test_a_live_line_for_what_is_waited_for_on_a_terminal() -> None:
    text = StringIO()
    with Waiting(lambda: "loading the checkpoint: 45%", Terminal(file=text, force_terminal=True, width=60)):
        assert until(text, "loading the checkpoint: 45%")


def test_the_live_line_of_a_resumed_run_begins_at_its_step() -> None:
    text = StringIO()
    run = RunConsole(73, Terminal(file=text, force_terminal=True, width=60), doing=lambda: "evaluating")
    run.start("tiny", [], [], 71, 65.0)
    assert until(text, "71/73  evaluating  elapsed 1:0")
    run.close()
    assert "0/73" not in text.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_the_first_step_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 0.1)
    text = StringIO()
    screen = Terminal(file=text, force_terminal=terminal, width=60)
    run = RunConsole(10, screen, doing=lambda: "first step, of 3 microbatches")
    run.start("tiny", [], [])
    assert until(text, "first step, of 3 microbatches")
    run.progress(1, 1.0, 9.0)
    run.close()
