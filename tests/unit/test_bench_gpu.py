"""`make gpu` says what is missing, and a part of its benchmark that fails does not end the others."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tools import gpu
from tools.bench.gpu import PARTS, TINY, measure, row


def test_without_a_gpu_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 2
    assert capsys.readouterr().err == "make gpu needs a GPU, and torch finds none here; see llmtrain doctor\n"


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "NEEDED", ["numpy", "no_such_package", "nor_this"])
    assert gpu.obstacle().endswith(" lacks: no_such_package, nor_this")


def test_parts_end_in_time() -> None:
    assert sum(part.seconds for part in PARTS) < gpu.BENCHMARKS


def test_a_part_that_failed_is_a_row() -> None:
    part = replace(TINY[0], name="8B")
    assert row(part, "took over 9 s") == ["8B: failed (took over 9 s)", "", "", "", ""]


@pytest.mark.soak
def test_rehearsal_on_a_cpu(tmp_path: Path) -> None:
    text, whole = measure(TINY, "cpu", tmp_path)
    assert not whole
    lines = [line for line in text.splitlines() if line.startswith("| tiny")]
    assert [line.split(": ")[0].startswith(f"| {part.name}") for line, part in zip(lines, TINY, strict=True)] == [
        True
    ] * 3
    assert ["failed" in line for line in lines] == [False, False, True]
    assert "aten::" in (tmp_path / "tiny.txt").read_text()
