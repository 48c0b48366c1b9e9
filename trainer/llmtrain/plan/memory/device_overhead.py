"""The memory that a device needs besides the run's tensors. No torch in here."""

from dataclasses import dataclass

from llmtrain.plan.facts import Device
from llmtrain.plan.per_rank.process_groups import connections, group_sizes, message_groups
from llmtrain.plan.plan import Plan

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class DeviceOverhead:
    """Bytes that one rank takes on its device before it allocates a tensor, and the share that it loses.

    context: the process's context. recomputation: what it has more where blocks are recomputed. process: what it takes
    in the host's memory if it computes on a GPU. pair, group: buffers of a communicator of two, and of more, ranks.
    message: of one that carries messages between pipeline stages.
    connection: of an all-to-all, for each channel to each other rank of the node.
    fragmentation: memory that the allocator cannot use, as a share of the tensors that come and go in a step. Those
    that last as long as the run (model states, buffers) are allocated once and leave no gaps.
    """

    context: int
    recomputation: int
    process: int
    pair: int
    group: int
    message: int
    connection: int
    fragmentation: float


GPU = DeviceOverhead(
    context=512 * MIB,
    recomputation=0,
    process=1700 * MIB,
    pair=544 * MIB,
    group=688 * MIB,
    message=140 * MIB,
    connection=12 * MIB,
    fragmentation=0.15,
)
"""Context: 300 MB of CUDA with lazily loaded kernels (pytorch/pytorch, issue 107667), rounded up for the kernels that a
run loads and cuBLAS's workspaces. Process: the resident memory of a rank of a tiny model on an H200 (1.77 GB), mostly
libraries of torch and CUDA. Communicators: NCCL on A100 with NVLink (NVIDIA/nccl, issue 964); NCCL allocates as much
for each communicator, whatever the number of nodes (issue 864). Messages: buffers are proportional to channels (issue
986), of which an A100 has 24 and a message takes 4; and its connections. Connections: NCCL on 8 H100s, which has two
buffers for each, and 32 channels by default (issue 1685: 3.3 GB for a first all-to-all). Fragmentation: the mean of
eight language models in GMLake (Guo et al. 2024, section 5). Nothing is published for AMD; RCCL is NCCL's code, so the
same figures hold."""

CPU = DeviceOverhead(
    context=288 * MIB, recomputation=144 * MIB, process=0, pair=0, group=0, message=0, connection=0, fragmentation=0.0
)
"""Context: the resident memory of a rank of a tiny model, mostly torch's libraries, as `test_plan_budget.py` measures
it; torch.compile takes more. Recomputation: torch.utils.checkpoint imports the modules of torch.compile. gloo's buffers
are negligible, and glibc gives large blocks back to the system."""


def overhead_of(device: Device) -> DeviceOverhead:
    """Return the overhead of a kind of device."""
    return GPU if device == "cuda" else CPU


def communicator_bytes(plan: Plan, pipeline_rank: int, overhead: DeviceOverhead) -> int:
    """Return the bytes of the communicators of a rank. pipeline_rank: its coordinate along the pipeline axis."""
    sizes, messages = group_sizes(plan, pipeline_rank), message_groups(plan, pipeline_rank)
    communicators = sum(overhead.pair if size == 2 else overhead.group for size in sizes)
    communicators += messages * (overhead.message - overhead.pair)
    return communicators + overhead.connection * connections(plan, pipeline_rank)
