"""Random plans of small models on up to 32 ranks, through the real loader and planner."""

from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

from llmtrain.errors import BadInputError
from llmtrain.plan.facts import Facts
from llmtrain.plan.per_rank.roles import roles
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.resident_check import least_resident
from llmtrain.recipe.load import load_recipe

MOST_RANKS = 32
SCHEDULES = ("gpipe", "1f1b", "interleaved", "breadth-first", "zero-bubble", "zero-bubble-v", "message-driven")


class RandomPlans:
    """Makes plans. The same seed makes the same plans. refused: choices that the planner did not allow."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._path, self._random = folder / "random.yaml", Random(seed)
        self.refused = 0

    def next(self) -> tuple[list[str], Plan]:
        """Return the next plan, and the keys of its recipe."""
        while True:
            keys, facts = self._keys()
            try:
                plan = self._plan(keys, facts)
                if self._random.random() < 0.4:
                    keys.append(f"zero.resident={self._resident(plan)}")
                    plan = self._plan(keys, facts)
            except BadInputError:
                self.refused += 1
                continue
            return [*keys, str(facts)], plan

    def _plan(self, keys: list[str], facts: Facts) -> Plan:
        # Overrides take longer to load than a file.
        self._path.write_text(recipe_text(keys))
        return make_plan(load_recipe(str(self._path), []), facts)

    def _keys(self) -> tuple[list[str], Facts]:
        choose = self._random.choice
        pipeline, tensor = choose((1, 1, 2, 3, 4, 8)), choose((1, 1, 2, 4))
        data = choose([ranks for ranks in (1, 2, 3, 4, 6, 8, 12, 16) if ranks * pipeline * tensor <= MOST_RANKS])
        schedule = choose(SCHEDULES)
        chunks = {"interleaved": choose((2, 3)), "breadth-first": choose((2, 3, 4)), "zero-bubble-v": 2}.get(
            schedule, 1
        )
        stages = pipeline * chunks if pipeline > 1 or schedule == "breadth-first" else 1
        keys = [
            "model.hidden=32",
            "model.heads=4",
            "data.path=corpus",
            "data.sequence_length=16",
            f"model.family={choose(('gpt2', 'llama', 'neox'))}",
            f"model.layers={stages + self._random.randrange(6)}",
            f"model.vocab={self._random.randrange(90, 140)}",
            f"model.tie_embeddings={choose(('true', 'false'))}",
            "train.microbatch=1",
            f"train.global_batch={data * self._random.randrange(1, 10)}",
            f"precision.compute={choose(('fp32', 'bf16', 'fp16'))}",
            choose(("precision.reduce=compute", "precision.reduce=fp32", "precision.gradients=compute")),
            f"parallel.tensor={tensor}",
            f"parallel.pipeline={pipeline}",
            f"parallel.sequence={'true' if tensor > 1 and choose((True, False)) else 'false'}",
            f"parallel.order={choose(('pipeline-data-tensor', 'data-pipeline-tensor'))}",
            f"activation_checkpointing={choose(('none', 'none', 'full', 'auto', '{every: 2}', '{every: 3}'))}",
            f"zero.hierarchical={choose(('auto', 'false'))}",
            *self._zero(data),
            *(self._offload() if choose((True, False, False)) else []),
        ]
        if stages > 1:
            keys += [f"pipeline.schedule={schedule}", f"pipeline.chunks={chunks}"]
            keys += [f"pipeline.limit={choose((1, 2, 5))}"] if choose((True, False)) else []
        world = pipeline * tensor * data
        return keys, Facts(world=world, device="cpu", ranks_per_node=choose((1, 2, 4, 8, world)))

    def _zero(self, data: int) -> list[str]:
        """Return keys for where model states are held and how they travel."""
        choose = self._random.choice
        kind = choose(("stage", "stage", "preset", "partition", "partition"))
        if kind == "stage":
            keys = [f"zero.stage={choose((0, 1, 2, 3, 3))}"]
        elif kind == "preset":
            keys = [f"zero.preset={choose(('mics', 'zero++', 'topo'))}"]
        else:
            degrees, largest = [], data
            for _ in range(3):
                largest = choose([number for number in range(1, largest + 1) if largest % number == 0])
                degrees.append(largest)
            names = zip(("optimizer", "gradients", "weights"), degrees, strict=True)
            keys = [f"zero.partition.{name}={degree}" for name, degree in names]
        if choose((True, False)):
            keys.append(f"zero.secondary={choose([number for number in range(1, data + 1) if data % number == 0])}")
        for name, packed in (("weights", "int8"), ("secondary", "int8"), ("gradients", "int4")):
            if choose((True, False, False)):
                keys.append(f"quantize.{name}={packed}")
        return [*keys, f"quantize.block={choose((32, 64, 256))}"]

    def _offload(self) -> list[str]:
        """Return keys for what rests outside of the memory that computes."""
        choose = self._random.choice
        rests = {name: choose(("none", "host", "nvme")) for name in ("optimizer", "parameters", "activations")}
        keys = [
            *(f"offload.{name}={tier}" for name, tier in rests.items()),
            f"offload.gradients={choose(('auto', 'none', 'host', 'nvme'))}",
            f"offload.bucket={choose(('auto', 1024, 4096))}",
            f"offload.overlap={choose(('auto', 1, 8))}",
        ]
        if rests["optimizer"] != "none":
            keys += [
                f"offload.step={choose(('host', 'device'))}",
                f"offload.share={choose(('auto', 0, 0.3, 1))}",
                f"offload.spare={choose(('auto', 0, 0.5, 1))}",
            ]
        in_files = any(key.endswith("=nvme") for key in keys)
        return [*keys, "offload.paths=[.]"] if in_files else keys

    def _resident(self, plan: Plan) -> int:
        """Return a budget for gathered weights between the least that suffices and more than all of them."""
        least = max(least_resident(plan, role.rank) for role in roles(plan))
        whole = max(role.parameters for role in roles(plan)) * plan.compute_bytes
        return least + int(self._random.uniform(0, 1.2) * max(0, whole - least))


def recipe_text(keys: Iterable[str]) -> str:
    """Return keys such as `zero.stage=3` as the text of a recipe."""
    root: dict[str, Any] = {}
    for key in keys:
        name, value = key.split("=")
        *sections, last = name.split(".")
        section = root
        for one in sections:
            section = section.setdefault(one, {})
        section[last] = value
    return "".join(f"{name}: {_flow(value)}\n" for name, value in root.items())


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_flow(one)}" for name, one in value.items()) + "}"
    return str(value)
