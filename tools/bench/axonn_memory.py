"""The memory that AxoNN reports for its 12B model on 48 GPUs (Singh and Bhatele 2022, section V), beside our plan's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmtrain.plan.views.view_tables import LABELS

from tools.bench.planned import GB, planned
from tools.bench.table import table

AXONN = """
name: axonn-12b
model: {family: gpt2, layers: 48, hidden: 4512, heads: 24, vocab: 51200, positions: 512, tie_embeddings: false}
data: {path: set, sequence_length: 512}
train: {global_batch: 2048, microbatch: 1}
precision: {compute: fp16}
parallel: {pipeline: 24, data: 2}
pipeline: {schedule: message-driven}
activation_checkpointing: {every: 1}
cluster: {accelerator: {name: V100-16GB, memory: 16GB}, node: {ranks: 6, host: {memory: 512GB}}}
"""
AXONN_RANKS = 48
# Elements of its buckets, and what it found on all GPUs without and with the optimization.
AXONN_BUCKET = 16 * 10**6
PLAIN_TOTAL, OPTIMIZED_TOTAL = 520 * GB, 130.24 * GB
OPTIMIZED = (
    "offload.optimizer=host",
    "offload.share=1",
    "offload.spare=0",
    "offload.step=device",
    f"offload.bucket={AXONN_BUCKET}",
    "precision.gradients=compute",
)


def means(plan: dict[str, Any]) -> dict[str, float]:
    """Return the bytes of each purpose on the mean rank's device."""
    roles = plan["memory"]["roles"]
    return {
        name: sum(role["ranks"] * role["device"][name] for role in roles) / plan["ranks"] for name in roles[0]["device"]
    }


@dataclass(frozen=True)
class Compared:
    """Memory of the mean GPU of AxoNN's run, in bytes. ours: by purpose. counted: what its text counts, by purpose.
    measured: what it found. more, less: what we hold and it does not, and the other way round."""

    ours: Mapping[str, float]
    counted: Mapping[str, float]
    measured: float
    more: Mapping[str, float]
    less: Mapping[str, float]

    @property
    def total(self) -> float:
        """What our plan takes."""
        return sum(self.ours.values())

    @property
    def comparable(self) -> float:
        """What our plan takes of what both hold, and what it alone holds."""
        return self.total - sum(self.more.values()) + sum(self.less.values())

    @property
    def ratio(self) -> float:
        """The same by what it found."""
        return self.comparable / self.measured


def axonn() -> tuple[Compared, Compared]:
    """Return AxoNN's 12B model without and with its optimization."""
    plans = [planned(AXONN, keys, AXONN_RANKS) for keys in ((), OPTIMIZED)]
    plain, moved = map(means, plans)
    # Each stage is on two ranks.
    elements = 2 * plans[0]["parameters"] / AXONN_RANKS
    unlike = ("in_flight", "context", "communicators", "fragmentation")
    return (
        Compared(
            plain,
            {"weights": 2 * elements, "gradients": 6 * elements, "optimizer": 12 * elements},
            PLAIN_TOTAL / AXONN_RANKS,
            {name: plain[name] for name in unlike},
            {"fp16 gradients beside the fp32 ones": 2 * elements},
        ),
        Compared(
            moved,
            {"weights": 2 * elements, "gradients": 2 * elements, "offload_slots": 16 * AXONN_BUCKET},
            OPTIMIZED_TOTAL / AXONN_RANKS,
            {name: moved[name] for name in (*unlike, "offload_slots")},
            {"one bucket of states on the GPU": 16 * AXONN_BUCKET},
        ),
    )


def axonn_rows(both: Sequence[Compared]) -> list[list[str]]:
    """Return a row for each line of memory: the paper's and ours, without and with its optimization."""

    def row(label: str, theirs: Sequence[float | None], ours: Sequence[float | None]) -> list[str]:
        cells = (cell for pair in zip(theirs, ours, strict=True) for cell in pair)
        return [label, *("" if cell is None else f"{cell / GB:.2f}" for cell in cells)]

    none = [None] * len(both)
    rows = [
        row(
            LABELS[name].removesuffix(" (fp32 sums)"),
            [one.counted.get(name) for one in both],
            [one.ours[name] for one in both],
        )
        for name in both[0].ours
        if any(one.ours[name] for one in both)
    ]
    measured = [one.measured for one in both]
    rows.append(row("everything else", [one.measured - sum(one.counted.values()) for one in both], none))
    rows.append(row("**sum**", measured, [one.total for one in both]))
    for sign, kind in (("-", "more"), ("+", "less")):
        for name in dict.fromkeys(name for one in both for name in getattr(one, kind)):
            label = f"{sign} {LABELS.get(name, name)}"
            rows.append(row(label, none, [getattr(one, kind).get(name) for one in both]))
    rows.append(row("**what both hold, and what it alone holds**", measured, [one.comparable for one in both]))
    return rows


def axonn_text() -> str:
    """Return the section on AxoNN."""
    both = axonn()
    header = ("GB on the mean GPU", "AxoNN", "llmtrain", "optimized: AxoNN", "llmtrain")
    totals = [f"{AXONN_RANKS * one.total / GB:,.0f} GB against {AXONN_RANKS * one.measured / GB:,.1f}" for one in both]
    return "\n\n".join(
        (
            "## AxoNN's 12B model on 48 V100",
            "`python -m tools.bench.papers_memory`, from `llmtrain plan --json`. AxoNN, section V: 48 layers, hidden "
            "4512, vocabulary 51200, 512 tokens, 24 stages x 2 replicas, microbatch 1, fp16, recomputation. It found "
            "520 GB on all GPUs, and 130.24 GB with fp32 weights and moments on the host, which pass through buckets "
            "of 16M elements on the GPU. Its lines are those of its formulas, `20 phi` and `4 phi + 16 bsize`; the "
            "difference to what it found is `everything else`.",
            table(header, axonn_rows(both)),
            f"On all GPUs the plan has {totals[0]} without and {totals[1]} with the optimization. Without the lines "
            f"that only one of them holds, it is {both[0].ratio:.2f} and {both[1].ratio:.2f} of what AxoNN found.",
            AXONN_LINES,
        )
    )


AXONN_LINES = """\
- *gradients*: AxoNN counts fp16 gradients (2 bytes) and fp32 ones (4), and deletes the latter in its
  optimization. We sum in fp32 alone (4 bytes), and with the optimization in fp16 alone
  (`precision.gradients: compute`).
- *buffers in flight*: our reductions run unit by unit, and each of those under way has an fp32 sum, what it receives
  in fp16, and without the optimization what it sends in fp16. Each stage has two blocks of 244M parameters. AxoNN
  reduces the fp16 gradients where they lie.
- *context, communicators, fragmentation*: what nvidia-smi shows beside tensors. AxoNN does not count them: what is left
  of its 130.24 GB beside its own formula is 0.43 GB on a GPU, which the activations take.
- *slots*: with the optimization both step buckets of 16M elements on the GPU. AxoNN counts one, of 16 bytes for each
  element with its fp32 gradients; ours are four slots of 12 bytes, so that buckets come and go while one is stepped.
  Our kernel reads the fp16 gradients. Our default is a bucket of 0.5M elements, whose slots take 0.03 GB.
- The embedding and the head are two matrices here. AxoNN does not say whether they are one; on two stages, each holds a
  copy in either case."""
