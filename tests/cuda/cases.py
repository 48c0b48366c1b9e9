"""What is rehearsed."""

from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class Case:
    """A run. world: number of ranks. keys: overrides of the recipe. node: ranks of a node, 0 for all of them.
    accumulation: microbatches of a step. tensor, pipeline: degrees of those axes. waits: where the main thread waits
    for the device in a step, beside the wait for the loss and the norm. drained: where it waits for threads while the
    device idles, beside the wait for sums of gradients that rest elsewhere, after the passes. uncounted: first steps
    that copy more than the others, and are finished before these begin. saves: whether a checkpoint is saved before
    each step; of one rank, as none answers another's messages. checks: whether replicas are compared and the weights
    evaluated there. rewinds: whether the run rewinds after the steps, to the last checkpoint or, if none is saved, to
    states of zeros, and does another step."""

    world: int = 1
    keys: tuple[str, ...] = ()
    _: KW_ONLY
    node: int = 0
    accumulation: int = 2
    tensor: int = 1
    pipeline: int = 1
    waits: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()
    uncounted: int = 0
    saves: bool = False
    checks: bool = False
    rewinds: bool = False

    @property
    def overrides(self) -> tuple[str, ...]:
        """All overrides of the recipe."""
        data = self.world // self.tensor // self.pipeline
        grid = (f"parallel.tensor={self.tensor}", f"parallel.pipeline={self.pipeline}")
        return (*grid, f"train.global_batch={data * self.accumulation}", *self.keys)


# By what waits, and for what.
NORM, OWN_SECONDS = "an event in device.py:wait", "the device in activity.py:own_seconds"
STEPPED = "the device in device.py:synchronize"
SUMMED, NO_MESSAGE = "gradients.py:finish", "transport.py:wait_any"
SLOT = "a stream in gradient_tiers.py:put"
KEPT = (*2 * ("an event in activation_copies.py:release",), *2 * ("an event in stalls.py:timed",))


def _stage(number: int) -> str:
    return f"zero.stage={number}"


INT8, SECOND, INT4 = "quantize.weights=int8", "quantize.secondary=int8", "quantize.gradients=int4"
FP32, FP16, WIDE = "precision.compute=fp32", "precision.compute=fp16", "precision.reduce=fp32"
TIED, LLAMA, NEOX = "model.tie_embeddings=true", "model.family=llama", "model.family=neox"
UNTIED, RECOMPUTED, SEQUENCE = "model.tie_embeddings=false", "activation_checkpointing=full", "parallel.sequence=true"
BUCKETS = "offload.bucket=4096"
HOST, ON_DEVICE = ("offload.optimizer=host", "optimizer.clip=1.0e6", BUCKETS), "offload.step=device"
WEIGHTS, GRADIENTS = ("offload.parameters=host", BUCKETS), "offload.gradients=host"
WAITING = ("offload.spare=1", "offload.spare_weights=device")
FILES, AHEAD = "offload.paths=[.]", "optimizer.clip=1.0e6"
BREADTH = "pipeline.schedule=breadth-first"
BORDERS = (RECOMPUTED, "offload.activations=host")

SHARDING = {
    "one rank": Case(),
    "stage 0": Case(2, (_stage(0),)),
    "stage 1": Case(2, (_stage(1),)),
    "stage 2": Case(2, (_stage(2),)),
    "stage 3": Case(2, (_stage(3),)),
    "stage 3, fp32": Case(2, (_stage(3), FP32)),
    "stage 1, fp16": Case(2, (_stage(1), FP16)),
    "stage 1, sums sent in fp32": Case(2, (_stage(1), WIDE)),
    "stage 3, 2 nodes, sums sent in fp32": Case(4, (_stage(3), WIDE), node=2),
    "stage 3, tied": Case(2, (_stage(3), TIED)),
    "stage 3, nothing resident": Case(2, (_stage(3), "zero.resident=0"), accumulation=3),
    "stage 3, logged": Case(2, (_stage(3), "logging.every=1"), waits=(OWN_SECONDS,)),
    "stage 1, 2 nodes": Case(4, (_stage(1),), node=2),
    "stage 2, 2 nodes": Case(4, (_stage(2),), node=2),
    "stage 3, 2 nodes": Case(4, (_stage(3),), node=2),
    "stage 3, flat": Case(4, (_stage(3), "zero.hierarchical=false"), node=2),
    "stage 3, secondary copy": Case(4, (_stage(3), "zero.secondary=2"), node=2),
    "mics": Case(4, ("zero.preset=mics",), node=2),
    "weights 1, gradients 2, optimizer 4": Case(
        4, ("zero.partition={weights: 1, gradients: 2, optimizer: 4}",), node=2
    ),
    "weights 2, gradients 2, optimizer 4": Case(
        4, ("zero.partition={weights: 2, gradients: 2, optimizer: 4}",), node=2
    ),
    "stage 1, int8": Case(2, (_stage(1), INT8)),
    "stage 3, int8": Case(2, (_stage(3), INT8)),
    "stage 2, int4": Case(2, (_stage(2), INT4)),
    "stage 3, int4, 2 nodes": Case(4, (_stage(3), INT4), node=2),
    "zero++": Case(4, ("zero.preset=zero++",), node=2),
    "topo": Case(8, ("zero.preset=topo",), node=4),
}
PARALLEL = {
    "tensor": Case(2, tensor=2),
    "tensor, sequence": Case(2, (SEQUENCE,), tensor=2),
    "tensor, stage 3": Case(4, (_stage(3),), tensor=2),
    "tensor, stage 1, fp32": Case(4, (_stage(1), FP32), tensor=2),
    "tensor, sequence, stage 3": Case(4, (_stage(3), SEQUENCE, LLAMA, "model.kv_heads=4"), tensor=2),
    "tensor, sequence, stage 1, int8": Case(4, (_stage(1), INT8, SEQUENCE), tensor=2),
    "tensor, sequence, stage 3, int4": Case(4, (_stage(3), INT4, SEQUENCE), tensor=2),
    "gpipe": Case(2, ("pipeline.schedule=gpipe",), pipeline=2),
    "1f1b": Case(2, pipeline=2, accumulation=4),
    "1f1b, tied": Case(2, (TIED,), pipeline=2),
    "1f1b, stage 3": Case(4, (_stage(3),), pipeline=2),
    "1f1b, stage 2, tensor": Case(8, (_stage(2), SEQUENCE), pipeline=2, tensor=2),
    "interleaved": Case(2, ("pipeline.schedule=interleaved", "model.layers=4"), pipeline=2),
    "interleaved, stage 3": Case(4, ("pipeline.schedule=interleaved", "model.layers=4", _stage(3)), pipeline=2),
    "breadth-first": Case(1, (BREADTH, RECOMPUTED), accumulation=4),
    "breadth-first, stage 3, 2 nodes": Case(4, (BREADTH, _stage(3)), node=2, accumulation=4),
    "breadth-first, stage 2, int4, tied": Case(2, (BREADTH, _stage(2), INT4, TIED), accumulation=3),
    "breadth-first, tensor, sequence, stage 3": Case(4, (BREADTH, _stage(3), SEQUENCE), tensor=2, accumulation=3),
    "breadth-first, 2 stages, stage 3": Case(4, (BREADTH, _stage(3), "model.layers=4"), pipeline=2, accumulation=3),
    "zero bubble": Case(2, ("pipeline.schedule=zero-bubble",), pipeline=2),
    "zero bubble, stage 3": Case(4, ("pipeline.schedule=zero-bubble", _stage(3)), pipeline=2),
    "zero bubble v": Case(2, ("pipeline.schedule=zero-bubble-v", "model.layers=4"), pipeline=2, accumulation=4),
    "message-driven": Case(2, ("pipeline.schedule=message-driven",), pipeline=2, drained=(NO_MESSAGE,)),
    "message-driven, tensor": Case(
        4, ("pipeline.schedule=message-driven",), pipeline=2, tensor=2, drained=(NO_MESSAGE,)
    ),
    "message-driven, tensor, sequence, stage 1": Case(
        8, ("pipeline.schedule=message-driven", SEQUENCE, _stage(1)), pipeline=2, tensor=2, drained=(NO_MESSAGE,)
    ),
    "recomputed": Case(1, (RECOMPUTED,)),
    "recomputed, stage 3": Case(2, (RECOMPUTED, _stage(3))),
    "recomputed, tensor, sequence": Case(2, (RECOMPUTED, SEQUENCE, NEOX), tensor=2),
    "recomputed, 1f1b": Case(2, (RECOMPUTED,), pipeline=2),
}
REGISTERED = "zero.registered=true"
REGISTERS = {
    "registered, stage 2": Case(2, (_stage(2), REGISTERED)),
    "registered, stage 3": Case(2, (_stage(3), REGISTERED)),
    "registered, stage 3, fp32": Case(2, (_stage(3), FP32, REGISTERED)),
    "registered, stage 0, fp32": Case(2, (_stage(0), FP32, REGISTERED)),
    "registered, stage 1, fp32": Case(2, (_stage(1), FP32, REGISTERED)),
    "registered, zero++": Case(4, ("zero.preset=zero++", REGISTERED), node=2),
    "registered, topo, 1f1b": Case(8, ("zero.preset=topo", REGISTERED), node=2, pipeline=2),
}
OFFLOAD = {
    "optimizer on the host": Case(2, (_stage(1), *HOST)),
    "optimizer on the host, stage 3": Case(2, (_stage(3), *HOST)),
    "optimizer on the host, stepped on the device": Case(2, (_stage(1), *HOST, ON_DEVICE)),
    "optimizer on the host, bf16 sums": Case(1, (*HOST, "precision.gradients=compute")),
    "optimizer on the host, int8": Case(2, (_stage(1), *HOST, INT8)),
    # What the first step steps ahead is discarded.
    "optimizer on the host, not ahead": Case(1, (*HOST, "optimizer.clip=1.0e-6"), uncounted=1),
    "optimizer on the host, logged": Case(2, (_stage(1), *HOST, "logging.every=1"), waits=(OWN_SECONDS, STEPPED)),
    "optimizer on the host, spikes rewind": Case(1, (*HOST, "on_spike={threshold: 1.0e6, action: rewind}")),
    "gradients on the host": Case(2, (_stage(2), *HOST, GRADIENTS)),
    "gradients on the host, sent in fp32": Case(4, ("zero.preset=mics", *HOST, GRADIENTS, WIDE), node=2),
    "gradients on the host, one rank": Case(1, (*WEIGHTS, *HOST, GRADIENTS)),
    "gradients on the host, 2 nodes": Case(4, ("zero.preset=mics", *HOST, GRADIENTS), node=2),
    "weights on the host": Case(2, (_stage(3), *WEIGHTS, *HOST)),
    "weights on the host, optimizer on the device": Case(2, (_stage(3), *WEIGHTS)),
    "weights on the host, tensor, sums sent in fp32": Case(2, (WIDE, *WEIGHTS), tensor=2),
    "weights on the host, one rank": Case(1, (*WEIGHTS, *HOST)),
    "weights on the host, some states": Case(2, (_stage(3), *WEIGHTS, *HOST, "offload.share=0.5")),
    "weights on the host, some states ahead": Case(
        1, (*WEIGHTS, *HOST, "offload.gradients=none", "offload.share=0.5", "offload.spare=1")
    ),
    # Ranks step parts of what each of them stores.
    "weights on the host, stage 1": Case(2, (_stage(1), *WEIGHTS, *HOST)),
    # All buckets are stepped ahead: no step lets the thread that publishes know of the stores before.
    "weights on the host, stage 1, stepped ahead": Case(
        2, (_stage(1), *WEIGHTS, *HOST, "offload.gradients=none", "offload.spare=1")
    ),
    "weights on the host, stepped ahead": Case(1, (*WEIGHTS, *HOST, "offload.gradients=none", "offload.spare=1")),
    "all on the host, breadth-first": Case(2, (_stage(3), *WEIGHTS, *HOST, GRADIENTS, BREADTH), accumulation=4),
    "optimizer on the host, breadth-first": Case(1, (*HOST, BREADTH, "offload.spare=1"), accumulation=4),
    "optimizer on the host, weights ahead on the device": Case(2, (_stage(1), *HOST, *WAITING)),
    "optimizer on the host, weights ahead on the device, stage 3": Case(2, (_stage(3), *HOST, *WAITING)),
    "stepped on the device, weights ahead there": Case(2, (_stage(1), *HOST, ON_DEVICE, *WAITING)),
    "optimizer in files": Case(1, ("offload.optimizer=nvme", FILES, AHEAD, BUCKETS)),
    "optimizer in files, stepped on the device": Case(1, ("offload.optimizer=nvme", FILES, AHEAD, BUCKETS, ON_DEVICE)),
    "gradients in files": Case(1, (*WEIGHTS, "offload.gradients=nvme", FILES), waits=43 * (SLOT,)),
    # What the step before has stored, for the first unit.
    "weights in files": Case(
        1, ("offload.parameters=nvme", "offload.gradients=none", FILES), drained=("weight_updates.py:wait",)
    ),
    "weights in files, stage 3": Case(
        2,
        ("offload.parameters=nvme", "offload.optimizer=nvme", FILES, BUCKETS, _stage(3)),
        drained=2 * ("weights.py:gather",),
    ),
    "activations on the host": Case(1, BORDERS, waits=KEPT),
    "activations on the host, stage 3": Case(2, (*BORDERS, _stage(3)), waits=KEPT),
    "activations on the host, 1f1b": Case(2, BORDERS, pipeline=2, waits=KEPT),
    "activations on the host, of both stages": Case(2, (*BORDERS, "model.layers=8"), pipeline=2, waits=3 * KEPT),
}
SAVES = {
    "saved": Case(saves=True),
    "saved, fp32": Case(1, (FP32,), saves=True),
    "saved, optimizer on the host": Case(1, HOST, saves=True),
    "saved, some states on the host": Case(1, (*HOST, "offload.share=0.5"), saves=True),
    "saved, optimizer in files": Case(1, ("offload.optimizer=nvme", FILES, AHEAD, BUCKETS), saves=True),
}
CHECKS = {
    "checked": Case(checks=True),
    "checked, stage 1": Case(2, (_stage(1),), checks=True),
    "checked, stage 3": Case(2, (_stage(3),), checks=True),
    "checked, tensor, sequence": Case(4, (_stage(1), SEQUENCE), tensor=2, checks=True),
    "checked, 1f1b, tied": Case(4, (_stage(1), TIED), pipeline=2, checks=True),
    "checked, interleaved": Case(2, ("pipeline.schedule=interleaved", "model.layers=4"), pipeline=2, checks=True),
    "checked, zero++": Case(4, ("zero.preset=zero++",), node=2, checks=True),
    "checked, offload": Case(2, (_stage(3), *WEIGHTS, *HOST), checks=True),
    "checked, activations on the host": Case(1, BORDERS, waits=KEPT, checks=True),
}
DROPOUT = "model.dropout=0.1"
DROPS = {
    "dropout": Case(1, (DROPOUT,)),
    "dropout, recomputed": Case(1, (DROPOUT, RECOMPUTED)),
    "dropout, tensor, sequence": Case(2, (DROPOUT, SEQUENCE), tensor=2),
    "dropout, recomputed, 1f1b": Case(2, (DROPOUT, RECOMPUTED), pipeline=2),
}
REWINDS = {
    "rewound": Case(saves=True, rewinds=True),
    "rewound, stage 3": Case(2, (_stage(3),), rewinds=True),
    "rewound, optimizer on the host": Case(1, HOST, saves=True, rewinds=True),
    "rewound, weights on the host": Case(1, (*WEIGHTS, *HOST), saves=True, rewinds=True),
}
CASES = SHARDING | PARALLEL | REGISTERS | OFFLOAD | SAVES | CHECKS | DROPS | REWINDS
