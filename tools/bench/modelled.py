"""Model a training step on a GPU where there is none: run a step's operators on tensors without values, and add up
what each would take.

Usage: python -m tools.bench.modelled [--write docs/benchmarks.md]
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tools.fake_cuda.library import build as build_library
from tools.fake_cuda.library import load

load(build_library())

import torch  # noqa: E402
from llmtrain.comm.ranks import Ranks  # noqa: E402
from llmtrain.optim.clipping import step_numbers  # noqa: E402
from llmtrain.plan.facts import Facts  # noqa: E402
from llmtrain.plan.flops import datasheet_peak, flops_per_token  # noqa: E402
from llmtrain.plan.plan import Plan  # noqa: E402
from llmtrain.plan.resolve.make import make_plan  # noqa: E402
from llmtrain.plan.resolve.prepare import named_facts  # noqa: E402
from llmtrain.recipe.load import load_recipe  # noqa: E402
from llmtrain.training.build import Assembly, build  # noqa: E402
from llmtrain_kernels import triton_launch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from tools.bench.roofline import Cost, Operator, Rates, costs, step_seconds  # noqa: E402
from tools.bench.table import table, write_section  # noqa: E402
from tools.tensors import tensors_of  # noqa: E402

CASES = [(preset, sequence) for preset in ("gpt2-124m", "llama3.2-1b") for sequence in (1024, 2048)]
# Tokens of a step, about those of GPT-3's smallest models (Brown et al., 2020, table 2.1).
TOKENS = 2**19
CARD = "H100"
# They allocate, or make another tensor of the same memory, or say something about a tensor.
SILENT = ("empty", "new_empty", "_unsafe_view", "lift_fresh", "set_", "detach", "prim_", "device", "is_pinned")


class Trace(TorchDispatchMode):
    """Notes every operator that would be a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = op(*args, **kwargs)
        name, results = op._schema.name.split("::")[1], [one.alias_info for one in op._schema.returns]
        views = bool(results) and all(alias is not None and not alias.is_write for alias in results)
        if not views and not name.startswith(SILENT):
            taken, updated = list[Tensor](), list[Tensor]()
            for place, argument in enumerate(op._schema.arguments):
                here = tensors_of(args[place] if place < len(args) else kwargs.get(argument.name))
                taken += here
                if argument.alias_info is not None and argument.alias_info.is_write:
                    updated += here
            new = [one for one in tensors_of(found) if all(one is not other for other in taken)]
            if any(one.is_cuda for one in (*taken, *new)):
                # What an operator fills it does not read.
                fills = name in ("zero_", "fill_", "copy_") or "out" in op._overloadname or name == "adamw"
                read = [one for one in taken if not (fills and any(one is other for other in updated))]
                self.operators.append(operator(name, taken, read, [*updated, *new]))
        return found


def operator(name: str, taken: list[Tensor], read: list[Tensor], written: list[Tensor]) -> Operator:
    """Return a kernel with the bytes that it has to move."""
    nbytes = sum(map(moved, read)) + sum(map(moved, written))
    if name == "cross_entropy_rows":
        # It reads the logits twice.
        nbytes += moved(read[0])
    elif name == "embedding":
        # It reads the rows that it returns, and the ids.
        nbytes = 2 * sum(map(moved, written)) + moved(read[1])
    elif name == "accumulate":
        # It reads and writes only those elements of the sum for which there are gradients.
        flat, *gradients = taken
        nbytes = sum(moved(one) + 2 * flat.itemsize * one.numel() for one in gradients)
    return Operator(name, tuple(tuple(one.shape) for one in taken), tuple(tuple(one.shape) for one in written), nbytes)


def moved(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; those that a stride of 0 repeats count once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.itemsize


@contextmanager
def device() -> Iterator[None]:
    """Let tensors of a GPU have no values, and its streams do nothing."""
    stream = mock.MagicMock()
    stands = {
        "Stream": lambda *arguments, **options: stream,
        "Event": lambda *arguments, **options: mock.MagicMock(),
        "current_stream": lambda *arguments: stream,
        "stream": lambda one: nullcontext(),
        "get_device_capability": lambda *arguments: (9, 0),
        "_lazy_init": lambda: None,
    }
    with ExitStack() as entered:
        for name, stand in stands.items():
            entered.enter_context(mock.patch.object(torch.cuda, name, stand))
        entered.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor))
        # On tensors without values torch chooses attention of many kernels.
        entered.enter_context(mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attention))
        entered.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = True, **_: Any) -> Tensor:
    """Attention in one kernel, as FlashAttention has it."""
    mixed: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    return mixed


def plan_of(preset: str, sequence: int, *keys: str) -> Plan:
    """Return the plan of a run on one card of 80 GB. keys: further ones."""
    overrides = [
        f"model={{preset: {preset}, positions: {sequence}}}", f"data.sequence_length={sequence}", "data.path=none",
        f"train.global_batch={TOKENS // sequence}", "train.compile=false", "precision.compute=bf16",
        "activation_checkpointing=auto", "cluster={accelerator: {name: H100, memory: 80GB}}",
    ]  # fmt: skip
    recipe = load_recipe("gpt2-124m", [*overrides, *keys])
    return make_plan(recipe, named_facts(recipe, Facts(world=1, device="cuda", ranks_per_node=1, triton=True)))


def traced(plan: Plan) -> list[Operator]:
    """Return the operators of a step."""
    with device():
        ranks = Ranks(0, 0, plan.grid, torch.device("cuda", 0))
        parts = build(plan, ranks, lambda calls: None)
        shape = (plan.batch.sequences, plan.batch.sequence_length + 1)
        rows = torch.zeros(shape, dtype=torch.int64, device=ranks.device)
        trace = Trace()
        with trace:
            step(plan, parts, rows)
    return trace.operators


def step(plan: Plan, parts: Assembly, rows: Tensor) -> None:
    """Run a step's passes, and its optimizer. rows: int64 `[sequences, sequence_length + 1]`."""
    microbatch = plan.batch.microbatch
    parts.engine.begin_step(None)
    parts.executor.train(rows.split(microbatch), microbatch / len(rows))
    parts.engine.gradients.squared_norm()
    with mock.patch.object(Tensor, "__float__", return_value=1.0):
        parts.engine.step(step_numbers(plan.optimizer, 1e-4, 1, torch.ones(())))


@dataclass(frozen=True)
class Modelled:
    """A step. found: the cost of each class of operators. mfu: the model's FLOPs over those of the datasheet."""

    plan: Plan
    found: dict[str, Cost]
    mfu: float


def modelled(preset: str, sequence: int, triton: bool, rates: Rates) -> Modelled:
    """Return a whole step, from one of one microbatch and one of two. triton: whether our Triton kernels are used."""
    whole = plan_of(preset, sequence)
    microbatch, vocab = whole.batch.microbatch, whole.model.vocab
    (every,) = whole.pipeline.recompute
    recompute = f"activation_checkpointing={f'{{every: {every}}}' if every else 'none'}"
    with mock.patch.object(triton_launch, "triton_installed", return_value=triton):
        one, two = (
            costs(
                traced(plan_of(preset, sequence, f"train.global_batch={count * microbatch}",
                               f"train.microbatch={microbatch}", recompute)),
                vocab, rates,
            )
            for count in (1, 2)
        )  # fmt: skip
    further = whole.batch.sequences // microbatch - 1
    found = {
        kind: (first := one.get(kind, Cost())) + (cost + first.times(-1)).times(further) for kind, cost in two.items()
    }
    flops, peak = flops_per_token(whole.model, sequence) * TOKENS, datasheet_peak(CARD, "bf16")
    assert peak is not None
    return Modelled(whole, found, flops / step_seconds(found, rates) / peak)


HEADER = ("", "", "kernels", "head's products", "blocks' products", "attention", "cross-entropy", "norms", "optimizer",
          "other", "ns per token", "of 989 TFLOP/s")  # fmt: skip
TEXT = """## A step on a GPU, modelled

`python -m tools.bench.modelled`. **Not measured: modelled.** One card of 80 GB, bf16, `train.compile: false`, {tokens}
tokens a step in microbatches that `train.microbatch: auto` chooses; no blocks are recomputed. The operators of a whole
step of the trainer are recorded on tensors without values. Each takes the longer of its FLOPs at {products:.0f} TFLOP/s
(attention {attention:.0f}) and of the bytes that it has to move at {memory:.1f} TB/s; the host takes {launch:.0f} us
for each. Nanoseconds per token, by class of operators. `torch`: with torch's operators in place of the Triton kernels
of norms, activations, the rotary embedding, cross-entropy, sums of squares and AdamW. The last column is the model's
FLOPs (6 per parameter and token, attention not halved) over those of the datasheet.

{table}
"""


def row(case: str, label: str, one: Modelled, rates: Rates) -> list[str]:
    """Return a line of the table."""
    per_token = [one.found.get(kind, Cost()).seconds / TOKENS * 1e9 for kind in HEADER[3:10]]
    kernels, seconds = sum(cost.kernels for cost in one.found.values()), step_seconds(one.found, rates)
    shown = [f"{value:,.0f}" for value in (kernels, *per_token, seconds / TOKENS * 1e9)]
    return [case, label, *shown, f"{one.mfu:.1%}"]


def main() -> None:
    """Model all cases, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", metavar="FILE", help="write into this document")
    document = parser.parse_args().write
    rates, rows = Rates(), list[list[str]]()
    for preset, sequence in CASES:
        for label, triton in (("torch", False), ("ours", True)):
            one = modelled(preset, sequence, triton, rates)
            assert not one.plan.recomputes
            case = f"{preset}, {sequence:,} tokens, microbatch {one.plan.batch.microbatch}"
            rows.append(row(case, label, one, rates))
            print(" | ".join(rows[-1]), file=sys.stderr)
    text = TEXT.format(
        tokens=f"{TOKENS:,}", products=rates.products / 1e12, attention=rates.attention / 1e12,
        memory=rates.memory / 1e12, launch=rates.launch * 1e6, table=table(HEADER, rows),
    )  # fmt: skip
    if document:
        write_section(document, "modelled", text)
    else:
        print(text)


if __name__ == "__main__":
    main()
