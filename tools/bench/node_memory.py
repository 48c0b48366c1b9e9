"""The largest models that DeepSpeed and its peers train on one node (Hanindhito et al. 2024), beside our plan's.

The paper's GB are GiB: the tools that it read memory with print those, and the 129 that it found on a drive are 12
bytes of each of 11.4e9 parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmtrain.plan.memory.device_overhead import GPU

from tools.bench.planned import GIB, planned
from tools.bench.table import table

DEEPSPEED = """
name: one-node
model: {family: gpt2, layers: 26, hidden: 2048, heads: 16, vocab: 50257, positions: 1024}
data: {path: set, sequence_length: 256}
train: {global_batch: 64, microbatch: 16}
precision: {compute: fp16}
zero: {resident: 0}
activation_checkpointing: full
cluster:
  accelerator: {name: A100-40GB, memory: 39.59GiB}
  node: {ranks: 4, host: {memory: 1TiB}, nvme: [{path: /scratch}]}
"""
# What nvidia-smi found on each of its GPUs, with the largest models.
LEAST_USED, MOST_USED = 154 * GIB / 4, 157 * GIB / 4


@dataclass(frozen=True)
class Method:
    """A way to train. keys: ours for it. billions: parameters of the largest model that the paper trained with it.
    gradients, optimizer: GPUs over which it shards them."""

    name: str
    keys: tuple[str, ...]
    billions: float
    gradients: int
    optimizer: int
    ranks: int = 4


# Ends of the names of methods.
PEERS_WITH_ONE = ("DDP", "DDP, without recomputation", "ZeRO-1", "ZeRO-2", "ZeRO-3")
PLAIN, TWO = "activation_checkpointing=none", "train.global_batch=128"


def pipelined(stages: int) -> tuple[str, ...]:
    """Return the keys of a pipeline that shares 16 sequences among as many microbatches as it has stages."""
    return f"parallel.pipeline={stages}", "train.global_batch=16", f"train.microbatch={16 // stages}", PLAIN


METHODS = (
    Method("DDP", ("zero.stage=0",), 1.4, 1, 1),
    Method("DDP, without recomputation", ("zero.stage=0", PLAIN), 1.4, 1, 1),
    Method("Megatron-LM, tensor 4", ("parallel.tensor=4",), 5.5, 4, 4),
    Method("Megatron-LM, tensor 4, without recomputation", ("parallel.tensor=4", PLAIN), 5.5, 4, 4),
    Method("Megatron-LM, pipeline 4, without recomputation", pipelined(4), 5.5, 4, 4),
    Method("ZeRO-1", ("zero.stage=1",), 4.4, 1, 4),
    Method("ZeRO-2", ("zero.stage=2",), 5.2, 4, 4),
    Method("ZeRO-3", ("zero.stage=3",), 6.6, 4, 4),
    Method("2 nodes: Megatron-LM, tensor 8", ("parallel.tensor=8", TWO), 11.4, 8, 8, 8),
    Method("2 nodes: Megatron-LM, tensor 8, without recomputation", ("parallel.tensor=8", TWO, PLAIN), 11.4, 8, 8, 8),
    Method("2 nodes: Megatron-LM, pipeline 8, without recomputation", pipelined(8), 11.4, 8, 8, 8),
    Method("2 nodes: ZeRO-1", ("zero.stage=1", TWO), 1.45 * 4.4, 1, 8, 8),
    Method("2 nodes: ZeRO-3", ("zero.stage=3", TWO), 1.18 * 11.4, 8, 8, 8),
)


@dataclass(frozen=True)
class Outside:
    """A way to train 11.4e9 parameters on one node with states outside of its GPUs. device, host, files: GiB on the
    whole node that the paper found; None if it says that the model does not fit."""

    name: str
    keys: tuple[str, ...]
    device: int | None
    host: int | None = None
    files: int = 0


CONSOLIDATED = 11.4
HOST, NVME = ("offload.optimizer=host", "offload.share=1"), ("offload.optimizer=nvme", "offload.share=1")
# DeepSpeed keeps gradients on the host if it steps there.
SUMS = "offload.gradients=host"
OUTSIDE = (
    Outside("ZeRO-1, optimizer on the host", ("zero.stage=1", *HOST), None),
    Outside("ZeRO-2, optimizer on the host", ("zero.stage=2", *HOST, SUMS), 127, 353),
    Outside(
        "ZeRO-3, optimizer and parameters on the host",
        ("zero.stage=3", *HOST, SUMS, "offload.parameters=host"),
        157,
        295,
    ),
    Outside("ZeRO-3, optimizer on NVMe", ("zero.stage=3", *NVME, SUMS), 108, 317, 129),
    Outside(
        "ZeRO-3, optimizer and parameters on NVMe",
        ("zero.stage=3", *NVME, SUMS, "offload.parameters=nvme"),
        52,
        488,
        150,
    ),
)
LARGEST = Method("ZeRO-3, optimizer on NVMe", ("zero.stage=3", *NVME, SUMS), 33.3, 4, 4)
WITHOUT_WEIGHTS = replace(LARGEST, keys=(*LARGEST.keys, "offload.parameters=nvme"), billions=80)


def of_layers(method: Method | Outside, layers: int, ranks: int = 4) -> dict[str, Any]:
    """Return the plan of paper 1's model with so many layers."""
    return planned(DEEPSPEED, [*method.keys, f"model.layers={layers}"], ranks)


def layers_of(billions: float) -> int:
    """Return the layers with which paper 1's model is nearest to a size."""
    hidden, rows = 2048, 50257 + 1024 + 2
    return round((billions * 1e9 - rows * hidden) / (12 * hidden**2 + 13 * hidden))


def largest(method: Method) -> dict[str, Any]:
    """Return the plan of as many layers as fit."""
    first = layers_of(method.billions) // 2
    small, large = (_missing(of_layers(method, layers, method.ranks)) for layers in (first, 2 * first))
    # Memory is nearly linear in the layers.
    layers = max(1, int(first - small * first / (large - small)))
    found = of_layers(method, layers, method.ranks)
    step = -1 if _missing(found) > 0 else 1
    while (_missing(found) > 0) == (step < 0):
        before, layers = found, layers + step
        found = of_layers(method, layers, method.ranks)
    return before if step > 0 else found


def _missing(plan: Mapping[str, Any]) -> float:
    """Return the bytes that the fullest GPU lacks; below 0 those that are left."""
    return _fullest(plan) - float(plan["memory"]["limit"])


def node_rows() -> list[list[str]]:
    """Return a row for each method without offload: the plan at the paper's size, compared, and our largest size."""
    rows = []
    for method in METHODS:
        plan = of_layers(method, layers_of(method.billions), method.ranks)
        comparable, ratio = comparable_bytes(method, plan)
        further = further_communicators(method, plan)
        most = largest(method)["parameters"] / 1e9
        psi = plan["parameters"]
        rows.append(
            [
                method.name,
                f"{method.billions:.1f}",
                f"{_fullest(plan) / GIB:.1f}",
                f"-{2 * psi / method.gradients / GIB:.1f}",
                f"+{4 * psi / method.optimizer / GIB:.1f}",
                f"-{further / GIB:.1f}" if further else "",
                f"{comparable / GIB:.1f}",
                f"{ratio:.2f}",
                f"{most:.1f}",
                f"{most / method.billions:.2f}",
            ]
        )
    return rows


def comparable_bytes(method: Method, plan: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bytes of a plan's fullest GPU with fp16 gradients, fp32 ones for the step, and the communicators that
    the peers have, and their ratio to the mean of what the paper found."""
    psi = plan["parameters"]
    comparable = _fullest(plan) - 2 * psi / method.gradients + 4 * psi / method.optimizer
    comparable -= further_communicators(method, plan)
    return comparable, 2 * comparable / (LEAST_USED + MOST_USED)


def further_communicators(method: Method, plan: Mapping[str, Any]) -> int:
    """Return the bytes of communicators that a plan has more than a peer. DDP and ZeRO have one, of all ranks; those of
    Megatron-LM are not counted."""
    if method.name.endswith(PEERS_WITH_ONE):
        role = max(plan["memory"]["roles"], key=lambda role: role["total"])
        return int(role["device"]["communicators"]) - GPU.group
    return 0


def _fullest(plan: Mapping[str, Any]) -> float:
    return float(max(role["total"] for role in plan["memory"]["roles"]))


def outside_rows() -> list[list[str]]:
    """Return a row for each method with offload, at 11.4B parameters on one node of 4 GPUs."""
    rows = []
    for method in OUTSIDE:
        plan = of_layers(method, layers_of(CONSOLIDATED))
        (role,) = plan["memory"]["roles"]
        ours = (
            role["ranks"] * role["total"],
            role["ranks"] * sum(role["host"].values()),
            role["ranks"] * role["files"],
        )
        fits = "no" if plan["memory"]["excess"] else "yes"
        theirs = (method.device, method.host, method.files or None)
        cells = (
            cell
            for mine, other in zip(ours, theirs, strict=True)
            for cell in ("" if other is None else f"{other}", f"{mine / GIB:.0f}" if mine else "")
        )
        rows.append([method.name, "no" if method.device is None else "yes", fits, *cells])
    return rows


def deepspeed_text() -> str:
    """Return the section on DeepSpeed."""
    most, outside = (largest(method)["parameters"] / 1e9 for method in (LARGEST, WITHOUT_WEIGHTS))
    return "\n\n".join(
        (
            "## DeepSpeed's largest models on 4 A100 of 40 GB",
            "`python -m tools.bench.papers_memory`, from `llmtrain plan --json`. Hanindhito et al. 2024: hidden 2048, "
            "16 heads, 256 tokens, 16 sequences on each GPU, fp16, as many layers as fit. It found 38.5 to 39.25 GiB "
            "in use on each GPU. `plan` is that of its number of parameters, in GiB on a GPU.",
            table(
                (
                    "method",
                    "its largest, B",
                    "plan",
                    "fp16 sums",
                    "fp32 for the step",
                    "communicators",
                    "as it holds them",
                    "of 38.9",
                    "our largest, B",
                    "of its",
                ),
                node_rows(),
            ),
            DEEPSPEED_LINES,
            "With states outside of the GPUs, 11.4B parameters; GiB on the whole node:",
            table(
                ("method", "fits", "ours fits", "GPU", "ours", "host", "ours", "NVMe", "ours"),
                outside_rows(),
            ),
            OUTSIDE_LINES,
            f"The largest model with optimizer states on NVMe is 33.3B in the paper. By our plan {most:.1f}B fit, and "
            f"{outside:.1f}B with the weights on NVMe as well; then activations and their recomputation fill the GPUs. "
            f"What ends at 33.3B in the paper is not said. {HOST_LINE}",
        )
    )


# 317 GB of host memory with 11.4B parameters on NVMe, of which 25 are there without offload.
HOST_LINE = (
    f"Its host memory is near its end there: 317 GB at 11.4B, 25 of them for the processes, are "
    f"{25 + (317 - 25) * 33.3 / 11.4:.0f} of the node's 1024 GB at 33.3B; ours takes 4 bytes of each parameter."
)

DEEPSPEED_LINES = """\
- *fp16 sums*: we sum gradients in fp32, 4 bytes; its methods hold them in fp16, 2 bytes.
- *fp32 for the step*: its methods convert gradients to fp32 for the step (AxoNN counts the same): 4 bytes more of each
  parameter that a GPU steps. Our kernel reads the sums.
- *communicators*: DDP and ZeRO reduce in one communicator of all ranks. Ours have two for each level of states that
  ranks share, for gathers and for reductions, and one for sums over all ranks, each of 0.7 GiB. What Megatron-LM has is
  not known, so none is taken off.
- The paper does not say where it recomputes activations. ZeRO's models cannot fit without; of the others, both are
  here. It says that Megatron-LM runs with tensor 4 and pipeline 4, which would need 16 GPUs, and four microbatches, as
  many as model-parallel ranks. Its sizes are within 10% as pipelines whose microbatches share 16 sequences, on one
  node and on two; as tensor parallelism of 16 sequences at a time, only that of one node is.
- On 2 nodes its text gives no sizes of ZeRO, but ratios: 1.45 of one node's ZeRO-1, and 1.18 of Megatron-LM's.
- The vocabulary is GPT-2's; the paper does not say."""

OUTSIDE_LINES = """\
- GPU, ZeRO-3: ours is the least that runs (`zero.resident: 0`; what is left of the card would keep gathered weights).
  DeepSpeed uses the card for parameters that it fetches ahead and keeps. The paper gives no sizes of these, so the
  difference is not explained further.
- Host: ours are fp32 weights and moments (12 bytes of each parameter), fp32 sums of gradients (4) and 16-bit weights
  (2), as far as they are there. The paper's figures include what a node uses without offload (18 to 25 GiB), and double
  buffers, to which it puts down the rest without sizes.
- NVMe: 12 and 14 bytes of each parameter in both."""
