"""Small plans whose programs tests break."""

from pathlib import Path

from llmtrain.cluster.layout import Axis
from llmtrain.plan.facts import Facts
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import load_recipe

PLANS: dict[str, tuple[int, list[str]]] = {
    "stage3": (4, ["zero.stage=3"]),
    "stage1": (4, ["zero.stage=1"]),
    "resident": (4, ["zero.stage=3", "zero.resident=200KB"]),
    "secondary": (4, ["zero.stage=3", "zero.secondary=2"]),
    "rounded": (4, ["zero.stage=3", "zero.secondary=2", "quantize.secondary=int8"]),
    "pipeline": (4, ["zero.stage=3", "parallel.pipeline=2"]),
    "breadth": (4, ["zero.stage=3", "pipeline.schedule=breadth-first", "pipeline.chunks=2"]),
    "breadth tied": (
        8,
        ["zero.stage=3", "parallel.pipeline=2", "pipeline.schedule=breadth-first", "model.tie_embeddings=true"],
    ),
    "split": (4, ["zero.stage=3", "parallel.pipeline=2", "pipeline.schedule=zero-bubble", "model.tie_embeddings=true"]),
    "driven": (4, ["zero.stage=3", "parallel.pipeline=2", "pipeline.schedule=message-driven"]),
    "driven rounded": (
        8,
        [
            "parallel.pipeline=2",
            "pipeline.schedule=message-driven",
            "zero.partition.weights=2",
            "zero.secondary=4",
            "quantize.secondary=int8",
        ],
    ),
    "tensor": (4, ["zero.stage=3", "parallel.tensor=2"]),
    "sequence": (4, ["zero.stage=3", "parallel.tensor=2", "parallel.sequence=true"]),
    "sequence alone": (2, ["zero.stage=0", "parallel.tensor=2", "parallel.sequence=true"]),
    "packed": (4, ["zero.stage=3", "parallel.tensor=2", "quantize.gradients=int4"]),
    "gradients outside": (
        2,
        [
            "parallel.tensor=2",
            "offload.optimizer=nvme",
            "offload.paths=[/one]",
            "offload.gradients=nvme",
        ],
    ),
    "tied": (4, ["zero.stage=2", "parallel.pipeline=2", "model.tie_embeddings=true"]),
}

SUMS = {
    "sequence": "",
    "sequence alone": "partial",
    "packed": "stage",
    "tied": "tied",
    "split": "tied",
    "breadth tied": "tied",
}


def small_plan(folder: Path, name: str) -> Plan:
    """Return a plan of PLANS: 4 blocks, 4 microbatches, and two ranks on each machine."""
    world, keys = PLANS[name]
    path = folder / "small.yaml"
    path.write_text(
        "model: {family: llama, layers: 4, hidden: 32, heads: 4, vocab: 101}\n"
        "data: {path: d, sequence_length: 16}\ntrain: {global_batch: 16}\n"
    )
    facts = Facts(world=world, device="cpu", ranks_per_node=2)
    plan = make_plan(load_recipe(str(path), keys), facts)
    batch = 4 * plan.grid.degree(Axis.DATA)
    return make_plan(load_recipe(str(path), ["train.microbatch=1", f"train.global_batch={batch}", *keys]), facts)
