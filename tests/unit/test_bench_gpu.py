"""`make gpu` says what is missing, and a part of its benchmark that fails does not end the others."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llmtrain.comm.device import Gpu
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.memory_budget import memory_budget
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.prepare import named_facts
from llmtrain.recipe.load import load_recipe

from tools import gpu
from tools.bench import gpu as bench
from tools.bench import gpu_rank
from tools.bench.gpu import row, write_recipe
from tools.bench.gpu_parts import OFFLOAD, PARTS, TINY
from tools.bench.table import write_section

MEASURED = {"card": "card", "mfu": None, "planned": 0, "measured": 0}


def test_without_a_gpu_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 2
    assert capsys.readouterr().err == "make gpu needs a GPU, and torch finds none here; see llmtrain doctor\n"


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "NEEDED", ["numpy", "no_such_package", "nor_this"])
    assert gpu.obstacle().endswith(" lacks: no_such_package, nor_this")


def test_states_on_the_host_fit_its_memory(tmp_path: Path) -> None:
    """Of 128 GiB, a part that leaves states there takes three quarters at most, the largest model seven eighths."""
    outside = [part for part in OFFLOAD if any("offload" in key for key in part.keys)]
    assert len(outside) == len(OFFLOAD) - 1
    assert all(not key.startswith("offload.") for part in PARTS for key in part.keys)
    for number, part in enumerate(outside):
        folder = tmp_path / str(number)
        folder.mkdir()
        recipe = load_recipe(str(write_recipe(part, folder)), list(part.keys))
        plan = make_plan(recipe, named_facts(recipe, Facts(world=1, device="cuda", ranks_per_node=1)))
        (row,) = memory_budget(plan).rows
        largest, share = "offload.share=0.62" in part.keys, plan.sharding.offload.share
        least = share * 12 * row.role.parameters
        assert least < sum(row.host.values()) < (112 if largest else 96) * 2**30


def test_what_cuda_reads_is_set_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    class StartedError(Exception):
        pass

    def started(layout: object) -> None:
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
        raise StartedError

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setattr(gpu_rank, "connect", started)
    with pytest.raises(StartedError):
        gpu_rank.measured("none", [], 1, None)


def test_what_the_gpu_cannot_hold_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 30 GB: 124M, but not 1B. It is no failure."""
    ran: list[str] = []
    monkeypatch.setattr(bench, "gpus", lambda: [Gpu("card", 30 * 10**9, "", "")])
    monkeypatch.setattr(bench, "run_part", lambda part, *_: {"tokens_per_s": ran.append(part.name) or 1.0} | MEASURED)
    monkeypatch.setattr(sys, "argv", ["gpu", "--only", "124M", "1B"])
    with pytest.raises(SystemExit, match="0"):
        bench.main()
    assert ran == ["124M"]
    assert "1B needs 4" in capsys.readouterr().out


def test_a_part_that_failed_is_a_row() -> None:
    part = replace(TINY[0], name="8B")
    assert row(part, "took over 9 s") == ["8B: failed (took over 9 s)", "", "", "", ""]


def test_what_takes_too_long_is_asked_to_end(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('ends')"
    assert not gpu.run(2, "-c", code)
    assert "ends" in capfd.readouterr().out


@pytest.mark.soak
def test_rehearsal_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is written after each part, so that one that takes too long costs no other."""
    document = tmp_path / "benchmarks.md"
    document.write_text("")
    written: list[int] = []

    def noted(path: Path, name: str, text: str) -> None:
        written.append(text.count("| tiny"))
        write_section(path, name, text)

    monkeypatch.setattr(bench, "write_section", noted)
    words = ["gpu", "--device", "cpu", "--tiny", "--profiles", str(tmp_path), "--write", str(document)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="1"):
        bench.main()
    assert written == [1, 2, 3, 4, 5]
    lines = [line for line in document.read_text().splitlines() if line.startswith("| tiny")]
    assert all(line.startswith(f"| {part.name}") for line, part in zip(lines, TINY, strict=True))
    assert ["failed" in line for line in lines] == [False, False, False, False, True]
    assert "aten::" in (tmp_path / "tiny.txt").read_text()
    assert "zero.stage" in (tmp_path / "tiny-refused.log").read_text()
