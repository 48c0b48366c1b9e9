"""What a run says, and how it ends, where its last rows cannot be written."""

import re
from pathlib import Path

import pytest
from llmtrain.errors import PreemptedError, RunFailedError

from tests.tiny import small_files
from tests.unit.test_telemetry_logger import logger, recipe, rows, train


@pytest.mark.parametrize("error", [None, PreemptedError("told to stop")])
def test_a_full_disk_ends_no_run_before_its_last_row(
    tmp_path: Path, error: Exception | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is told to stop ends as it would, and warns that its last rows are lost."""
    lost = r"metrics\.jsonl cannot be written \(File too large\), and lacks 4 rows, the last included; make room"
    log = logger(tmp_path, recipe(every=1))
    log.start(0, [])
    train(log, 0, 1)

    def go_on() -> None:
        with small_files((tmp_path / "metrics.jsonl").stat().st_size), log:
            train(log, 1, 3)
            if error is not None:
                raise error
            log.end({})

    with pytest.raises(type(error or RunFailedError("")), match=str(error or lost)):
        go_on()
    assert [row["step"] for row in rows(tmp_path)] == [1]
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert "(File too large); rows wait in memory until it can be" in warnings[0]
    assert [bool(re.search(lost, line)) for line in warnings] == [False, True][: 1 + (error is not None)]
