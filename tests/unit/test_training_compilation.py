"""Whether blocks are compiled on GPUs: where that is faster on the main rank; the same on all ranks and after a
resume."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from llmtrain.comm.activity import Activity
from llmtrain.comm.ranks import Ranks
from llmtrain.plan.facts import Facts
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.prepare import check_and_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.training import compilation
from llmtrain.training.compilation import Timed, compiles, measure
from llmtrain.training.run_folder import write_record
from torch import Tensor

from tests.tiny import write_corpus

GPU, CPU = Facts(world=1, device="cuda"), torch.device("cpu")
RECIPE = """
model: {family: FAMILY, layers: 2, hidden: 32, heads: 4, vocab: 64, dropout: DROPOUT}
data: {path: set, sequence_length: 16}
train: {microbatch: 2}
optimizer: {warmup: 1}
"""
X = [torch.zeros(2)]
WAITING, WORKING = Timed(3e-3, 2.9e-3), Timed(3e-3, 1.4e-3)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(Path("set"), 40)


def plan(*keys: str, facts: Facts = GPU, family: str = "gpt2", dropout: float = 0.0) -> Plan:
    Path("tiny.yaml").write_text(RECIPE.replace("FAMILY", family).replace("DROPOUT", str(dropout)))
    return check_and_plan(load_recipe("tiny.yaml", keys), facts)


def rank(said: list[str], is_main: bool = True) -> Ranks:
    heard = (lambda name, text: said.append(text) or text) if is_main else (lambda name, text: said[-1])
    return cast(Ranks, SimpleNamespace(is_main=is_main, device=CPU, from_main=heard, activity=Activity()))


def timing(monkeypatch: pytest.MonkeyPatch, plain: Timed, compiled: Timed | Exception | None = None) -> list[Any]:
    """Time the passes as they are, and compiled; return what was timed."""
    asked = list[Any]()

    def timed(passes: Any, inputs: Sequence[Tensor]) -> Timed:
        asked.append(passes)
        if len(asked) == 1:
            return plain
        if isinstance(compiled, Exception):
            raise compiled
        assert compiled is not None
        return compiled

    monkeypatch.setattr(compilation, "_timed", timed)
    monkeypatch.setattr(torch, "compile", lambda passes, dynamic: ("compiled", passes))
    return asked


def test_a_gpu_that_works_all_the_time_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = timing(monkeypatch, WORKING)
    assert measure(torch.neg, X) == (
        False, "a block's passes take 3.00 ms, and 1.40 ms to launch, so torch.compile is not tried",
    )  # fmt: skip
    assert asked == [torch.neg]


@pytest.mark.parametrize(("seconds", "chosen"), [(2e-3, True), (4e-3, False)])
def test_a_gpu_that_waits_takes_what_is_faster(monkeypatch: pytest.MonkeyPatch, seconds: float, chosen: bool) -> None:
    asked = timing(monkeypatch, WAITING, Timed(seconds, seconds))
    said = f"a block's passes take 3.00 ms, and 2.90 ms to launch; compiled, {seconds * 1e3:.2f} ms"
    assert measure(torch.neg, X) == (chosen, said)
    assert asked == [torch.neg, ("compiled", torch.neg)]


def test_a_compiler_that_fails_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    timing(monkeypatch, WAITING, RuntimeError("no C compiler\nin PATH"))
    compiled, said = measure(torch.neg, X)
    assert not compiled
    assert said.endswith("; torch.compile fails here: no C compiler")


def test_all_ranks_do_what_the_main_one_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(compilation, "measure", lambda *given: (True, "measured"))
    assert compiles(plan(), rank(said)) == (True, ["measured"])
    monkeypatch.setattr(compilation, "measure", lambda *given: pytest.fail("measured twice"))
    assert compiles(plan(), rank(said, is_main=False)) == (True, [])


@pytest.mark.parametrize("compiled", [True, False])
def test_a_resumed_run_keeps_what_its_record_says(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    made = plan(facts=replace(GPU, compiled=compiled))
    assert made.training.compile == made.record["train"]["compile"] == compiled
    folder = Path(made.logging.dir) / made.name
    folder.mkdir(parents=True)
    monkeypatch.setattr(compilation, "measure", lambda *given: (not compiled, "measured"))
    # A CPU measures nothing.
    write_record(folder, plan(facts=Facts(world=1, device="cpu")))
    assert compiles(plan(), rank([])) == (not compiled, ["measured"])
    write_record(folder, made)
    assert compiles(plan(), rank([])) == (compiled, [])


@pytest.mark.parametrize(
    "keys", [("parallel.tensor=2",), ("parallel.pipeline=2",), ("train.deterministic=true",)], ids=str
)
def test_where_blocks_are_never_compiled(monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]) -> None:
    monkeypatch.setattr(compilation, "measure", lambda *given: pytest.fail("measured"))
    assert compiles(plan(*keys, facts=replace(GPU, world=2)), rank([])) == (False, [])


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox"])
def test_passes_of_a_block_are_timed(family: str) -> None:
    made = plan(family=family, dropout=0.0 if family == "llama" else 0.1)
    passes, inputs = compilation._passes(made, CPU)
    before, x = torch.get_rng_state(), inputs[0]
    seconds, launching = compilation._timed(passes, inputs)
    assert 0 < launching <= seconds
    assert torch.equal(torch.get_rng_state(), before)
    assert len(inputs) > 5
    assert x.shape == (2, 16, 32)
    assert x.dtype == torch.bfloat16
