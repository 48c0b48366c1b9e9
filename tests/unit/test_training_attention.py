"""The kernel of attention on GPUs: the quickest on the main rank, the same on all ranks and after a resume."""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from llmtrain.comm.ranks import Ranks
from llmtrain.errors import BadInputError
from llmtrain.model.layers import Attention
from llmtrain.plan.facts import Device, Facts
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.prepare import check_and_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.recipe.schema import Recipe
from llmtrain.start import run as start
from llmtrain.training import attention
from llmtrain.training.attention import choose, quickest, take_planned
from llmtrain.training.build import build
from llmtrain.training.run_folder import measured_on_gpu, write_record
from llmtrain_kernels.attention import op
from llmtrain_kernels.attention.choice import KERNELS, Kernel, is_installed, lack

from tests.tiny import write_corpus

GPU = Facts(world=1, device="cuda")
CPU = torch.device("cpu")
RECIPE = """
model: {family: gpt2, layers: 2, hidden: 32, heads: 4, vocab: 64}
data: {path: set, sequence_length: 16}
train: {microbatch: 2}
optimizer: {warmup: 1}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(Path("set"), 40)
    Path("tiny.yaml").write_text(RECIPE)


def recipe(*keys: str) -> Recipe:
    return load_recipe("tiny.yaml", keys)


def plan(*keys: str, facts: Facts = GPU) -> Plan:
    return check_and_plan(recipe(*keys), facts)


def main(said: list[str], others: list[list[int]] | None = None) -> Ranks:
    """The main rank, which notes what it says. others: which kernels other ranks have."""
    heard = {"from_main": lambda name, text: said.append(text) or text}
    gathered = {"gather_all": lambda own: [own, *(one[: len(own)] for one in others or [])]}
    return cast(Ranks, SimpleNamespace(is_main=True, device=torch.device("cuda"), **heard, **gathered))


def other(said: list[str]) -> Ranks:
    """Another rank, which hears what the main rank has said."""
    heard = {"from_main": lambda name, text: said.pop(0), "gather_all": lambda own: [own]}
    return cast(Ranks, SimpleNamespace(is_main=False, **heard))


def timed(**seconds: float) -> Callable[[Kernel], float]:
    """Times by kernel; a kernel without one does not run."""

    def found(kernel: Kernel) -> float:
        if (name := kernel.replace("-", "_")) not in seconds:
            raise RuntimeError("no kernel image is available")
        return seconds[name]

    return found


def untimed(kernel: Kernel) -> float:
    pytest.fail(f"{kernel} is timed")


def test_the_quickest_is_taken_by_all_ranks() -> None:
    said: list[str] = []
    seconds = timed(torch=0.003, flash_attn_2=0.002, cudnn=0.0025)
    kernel, sentences = choose(plan(), KERNELS, main(said), seconds)
    assert kernel == "flash-attn-2"
    assert sentences == [
        "attention, forward and backward, as measured: torch 3.00 ms, cudnn 2.50 ms, flash-attn-2 2.00 ms, "
        "flash-attn-3 does not run"
    ]
    assert choose(plan(), KERNELS, other(said), timed(torch=0.001, flash_attn_2=0.002)) == ("flash-attn-2", [])


def test_a_kernel_that_does_not_run_on_all_gpus_is_not_taken() -> None:
    seconds = timed(torch=0.003, flash_attn_2=0.002)
    kernel, sentences = choose(plan(), KERNELS, main([], [[1, 1, 0, 0]]), seconds)
    assert kernel == "torch"
    assert sentences[0].endswith(
        "torch 3.00 ms, cudnn does not run, flash-attn-2 does not run, flash-attn-3 does not run"
    )


def test_torch_is_taken_where_nothing_runs() -> None:
    assert choose(plan(), KERNELS, main([]), timed())[0] == "torch"


def test_a_resumed_run_keeps_the_kernel_of_its_record() -> None:
    made = plan()
    folder = Path(made.logging.dir) / made.name
    folder.mkdir(parents=True)
    assert measured_on_gpu(folder) == {}
    # As a CPU writes it, and as earlier versions did.
    write_record(folder, plan(facts=Facts(world=1, device="cpu")))
    assert choose(made, KERNELS, main([]), timed(torch=2.0, cudnn=1.0))[0] == "cudnn"
    (folder / "recipe.resolved.yaml").write_text("train: {attention: auto}")
    assert choose(made, KERNELS, main([]), timed(torch=2.0, cudnn=1.0))[0] == "cudnn"
    write_record(folder, plan(facts=replace(GPU, attention="cudnn")))
    asked: list[str] = []
    assert choose(made, KERNELS, main([]), lambda kernel: asked.append(kernel) or 1.0) == ("cudnn", [])
    assert asked == ["cudnn"]
    # The GPUs are others.
    assert choose(made, KERNELS, main([]), timed(torch=1.0))[0] == "torch"
    # It can no longer be taken.
    assert choose(made, ("torch", "flash-attn-2"), main([]), timed(torch=1.0, flash_attn_2=2.0))[0] == "torch"


@pytest.mark.parametrize("record", ["train: 5", "[a]", "train: {attention: 7}", "train: {", ""])
def test_a_record_that_is_damaged_names_no_kernel(record: str) -> None:
    Path("recipe.resolved.yaml").write_text(record)
    assert measured_on_gpu(Path()).get("attention") not in KERNELS


def test_the_record_of_a_measured_plan_makes_it_again() -> None:
    made = plan(facts=replace(GPU, attention="cudnn"))
    assert (made.training.attention, made.record["train"]["attention"]) == ("cudnn", "cudnn")
    Path("again.yaml").write_text(RECIPE.replace("microbatch: 2", "microbatch: 2, attention: cudnn"))
    again = make_plan(load_recipe("again.yaml", ["name=tiny"]), GPU)
    assert (again.training, again.record["train"]) == (made.training, made.record["train"])


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that the process has taken."""
    found: list[str] = []
    monkeypatch.setattr(attention, "take_kernel", found.append)
    monkeypatch.setattr(attention, "forget_peak_memory", lambda device: None)
    monkeypatch.setattr(attention, "is_installed", lambda kernel: kernel != "flash-attn-3")
    monkeypatch.setattr(attention, "takes_length", lambda kernel, length: True)
    return found


def test_auto_times_what_is_installed_for_all_ranks(taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Kernel] = []
    monkeypatch.setattr(attention, "_seconds", lambda plan, kernel, device: asked.append(kernel) or len(asked))
    kernel, sentences = quickest(plan(), main([], [[1, 1, 0, 1]]))
    assert asked == ["torch", "cudnn"]
    assert len(sentences) == 1
    assert (kernel, taken) == ("torch", [])


@pytest.mark.usefixtures("taken")
def test_nothing_is_timed_without_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_seconds", lambda plan, kernel, device: untimed(kernel))
    assert quickest(plan("precision.compute=fp32"), main([])) == ("torch", [])


@pytest.mark.parametrize(("device", "kernels"), [("cuda", ["cudnn"]), ("cpu", [])])
def test_a_process_takes_the_kernel_of_its_plan(device: Device, kernels: list[str], taken: list[str]) -> None:
    take_planned(plan("train.attention=cudnn", facts=Facts(world=1, device=device)))
    assert taken == kernels


@pytest.mark.usefixtures("taken")
def test_deterministic_runs_time_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Kernel] = []
    monkeypatch.setattr(attention, "_seconds", lambda plan, kernel, device: asked.append(kernel) or 1.0)
    quickest(plan("train.deterministic=true"), main([]))
    assert asked == ["torch", "flash-attn-2"]


def test_the_timer_runs_the_shapes_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: set[Any] = set()
    attend = op.causal_attention

    def noted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, kernel: Kernel) -> torch.Tensor:
        shapes.add((q.shape, k.shape, v.shape, q.dtype, dropout, kernel))
        return attend(q, k, v, dropout, kernel)

    monkeypatch.setattr(attention, "causal_attention", noted)
    monkeypatch.setattr(attention, "take_kernel", lambda kernel: None)
    made = plan("model.family=llama", "model.kv_heads=2", "parallel.tensor=2", facts=Facts(world=2, device="cuda"))
    state = torch.get_rng_state()
    assert attention._seconds(made, "torch", CPU) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert shapes == {((2, 16, 2, 8), (2, 16, 1, 8), (2, 16, 1, 8), torch.bfloat16, 0.0, "torch")}


@pytest.mark.parametrize(
    ("fault", "finds"),
    [
        (lambda mixed, q: mixed, False),
        # It rounds elsewhere.
        (lambda mixed, q: mixed * (1 + 2**-8), False),
        (lambda mixed, q: mixed.roll(1, 1), True),
        (lambda mixed, q: mixed * float("nan"), True),
        # Only at large scores.
        (lambda mixed, q: mixed if q.abs().max() < 8 else mixed * float("nan"), True),
        # Only the gradients.
        (lambda mixed, q: 2 * mixed - mixed.detach(), True),
    ],
)
def test_a_kernel_that_computes_something_else_is_not_taken(
    fault: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], finds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = op.causal_attention

    def faulty(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, kernel: Kernel) -> torch.Tensor:
        mixed = attend(q, k, v, dropout)
        return fault(mixed, q) if kernel == "cudnn" else mixed

    monkeypatch.setattr(attention, "causal_attention", faulty)
    monkeypatch.setattr(attention, "take_kernel", lambda kernel: None)
    drawn = torch.Generator().manual_seed(0)
    gradient, *inputs = (torch.randn(2, 32, 4, 16, generator=drawn, dtype=torch.bfloat16) for _ in range(4))
    with pytest.raises(RuntimeError, match="cudnn computes something else") if finds else nullcontext():
        attention.check_agreement("cudnn", [one.requires_grad_() for one in inputs], gradient)


def test_old_versions_of_cudnn_are_not_taken_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, found in ((None, False), (91002, False), (91500, False), (91501, True)):
        monkeypatch.setattr("torch.backends.cudnn.version", lambda version=version: version)
        assert op.takes_length("cudnn", 2000) is found
        assert op.takes_length("cudnn", 2048)
        assert op.takes_length("torch", 2000)


@pytest.mark.parametrize(
    ("keys", "kernel", "what"),
    [
        (("precision.compute=fp32",), "flash-attn-2", "fp32"),
        (("model.dropout=0.1",), "flash-attn-3", "dropout"),
        (("model.dropout=0.1",), "cudnn", "dropout but in multiples of 1/16"),
        (("train.deterministic=true",), "cudnn", "deterministic results"),
    ],
)
def test_a_kernel_that_does_not_suit_is_refused(keys: tuple[str, ...], kernel: str, what: str) -> None:
    with pytest.raises(BadInputError, match=f"train.attention is {kernel}, which has no {what}; set it to auto"):
        plan(f"train.attention={kernel}", *keys)
    assert plan("train.attention=torch", *keys).training.attention == "torch"
    assert plan(f"train.attention={kernel}").training.attention == kernel


def test_torch_suits_all_runs() -> None:
    assert lack("torch", wide=True, dropout=0.1, deterministic=True) == ""


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan("train.attention=flash-attn-3")
    assert not is_installed("flash-attn-3")
    assert "no package flash_attn_interface; install it" in str(start._attention_problem(made, GPU))
    assert start._attention_problem(made, Facts(world=1, device="cpu")) is None
    assert start._attention_problem(plan("train.attention=cudnn"), GPU) is None
    amd = replace(GPU, amd=True)
    for kernel in ("cudnn", "flash-attn-3"):
        said = start._attention_problem(plan(f"train.attention={kernel}"), amd)
        assert said == f"train.attention is {kernel}, which needs a GPU of NVIDIA's; set it to auto"


@pytest.fixture
def _flags() -> Iterator[None]:
    yield
    op.take_kernel("torch")
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.usefixtures("_flags")
@pytest.mark.parametrize("kernel", KERNELS)
def test_torch_takes_one_of_its_kernels(kernel: Kernel) -> None:
    op.take_kernel(kernel)
    enabled = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()
    assert enabled == ((True, False) if kernel == "cudnn" else (False, True))


@pytest.mark.parametrize("with_normalizers", [False, True])
@pytest.mark.parametrize("kernel", ["flash-attn-2", "flash-attn-3"])
def test_packages_are_called(kernel: Kernel, with_normalizers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Early versions of the third return the normalizers too."""
    given: list[dict[str, Any]] = []

    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **others: Any) -> Any:
        given.append(others)
        return (q, k) if kernel == "flash-attn-3" and with_normalizers else q

    for name in ("flash_attn", "flash_attn_interface"):
        package = ModuleType(name)
        package.flash_attn_func = flash if op.PACKAGES[kernel] == name else untimed  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, package)
    q = torch.zeros(1, 2, 2, 8, dtype=torch.bfloat16)
    assert op._flash_attention(q, q, q, 0.25, kernel) is q
    dropout = {"dropout_p": 0.25} if kernel == "flash-attn-2" else {}
    assert given == [{"causal": True, "deterministic": False, **dropout}]


def test_each_block_of_a_run_has_the_plans_kernel() -> None:
    made = plan("train.attention=flash-attn-2", facts=Facts(world=1, device="cpu"))
    parts = build(made, Ranks(0, 0, made.grid, CPU), lambda calls: None)
    kernels = [one.kernel for one in parts.model.modules() if isinstance(one, Attention)]
    parts.close()
    assert kernels == ["flash-attn-2"] * 2
    assert Attention.kernel == "torch"
