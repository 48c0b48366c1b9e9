"""Offload that needs C++ kernels is refused on a machine without a compiler, before a step."""

import errno
import functools
import json
from pathlib import Path

import pytest
from llmtrain.errors import BadInputError
from llmtrain.plan.facts import Device, Facts
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.offload_check import offload_kernels
from llmtrain.recipe.load import load_recipe
from llmtrain.start import run as start
from llmtrain_kernels import native
from llmtrain_kernels.direct_io.queue import DirectQueue

from tests.tiny import write_corpus

HOST = ("offload.optimizer=host",)
FILES = ("offload.optimizer=nvme", "offload.paths=[.]")
SAID = r"offload needs C\+\+ kernels.*there is no C\+\+ compiler; install g\+\+ or set CXX"


@pytest.fixture(autouse=True)
def _recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = {"family": "gpt2", "layers": 1, "hidden": 64, "heads": 2, "vocab": 64}
    Path("r.yaml").write_text(json.dumps({"model": model, "data": {"path": "set", "sequence_length": 16}}))
    write_corpus(tmp_path / "set", 20)


@pytest.fixture
def _no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has neither a compiler nor a library that one built before."""
    monkeypatch.setattr(native, "_library", functools.cache(native._library.__wrapped__))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize(
    ("device", "keys", "kernels"),
    [
        ("cuda", (), ()),
        ("cuda", HOST, ("adamw",)),
        ("cuda", (*HOST, "offload.step=device"), ()),
        ("cuda", FILES, ("direct_io", "adamw")),
        ("cuda", (*HOST, "offload.parameters=host"), ("adamw", "squared_sum")),
        ("cuda", ("offload.activations=nvme", *FILES[1:], "activation_checkpointing=full"), ("direct_io",)),
        ("cpu", HOST, ()),
        ("cpu", (*FILES, "offload.gradients=nvme"), ("direct_io",)),
    ],
)
def test_what_has_no_substitute(device: Device, keys: tuple[str, ...], kernels: tuple[str, ...]) -> None:
    plan = make_plan(load_recipe("r.yaml", keys), Facts(world=1, device=device))
    assert offload_kernels(plan) == kernels


@pytest.mark.usefixtures("_no_compiler")
def test_a_run_is_refused() -> None:
    with pytest.raises(BadInputError, match=SAID):
        start.start("r.yaml", [*FILES], 1, dry_run=False)
    assert not Path("runs").exists()


def test_files_without_io_uring_and_aio_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a strict container, before a rank starts."""

    def refuse(queue: DirectQueue, interface: str, depth: int, piece: int) -> int:
        raise OSError(errno.EPERM, f"{interface}: Operation not permitted")

    monkeypatch.setattr(DirectQueue, "_open", refuse)
    said = r"neither \(io_uring: Operation not permitted; aio: Operation not permitted\); allow one"
    with pytest.raises(BadInputError, match=said):
        start.start("r.yaml", [*FILES], 1, dry_run=False)
    assert not Path("runs").exists()
    # Nothing is in files.
    start.start("r.yaml", [*HOST], 1, dry_run=True)


@pytest.mark.parametrize(
    ("keys", "kernels", "block"),
    [
        ((), True, True),
        (("train.attention=torch",), False, True),
        (("train.compile=false",), True, False),
        (("train.deterministic=true",), True, False),
    ],
)
def test_a_dry_run_on_a_gpu_names_what_is_timed(
    keys: tuple[str, ...],
    kernels: bool,
    block: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(start, "_gpus", lambda place: 1)
    start.start("r.yaml", [*keys], 1, dry_run=True)
    output = capsys.readouterr().out
    assert ("the run times kernels of attention at its start" in output) is kernels
    assert ("the run times a block at its start" in output) is block
    assert "attention: torch" in output


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize(("keys", "refused"), [(HOST, True), ((*HOST, "offload.step=device"), False), ((), False)])
def test_a_dry_run_on_a_gpu_says_so(
    keys: tuple[str, ...], refused: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "_gpus", lambda place: 1)
    start.start("r.yaml", [*keys], 1, dry_run=True)
    assert ("offload needs C++ kernels" in capsys.readouterr().out) is refused
