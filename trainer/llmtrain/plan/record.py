"""The recipe that reproduces a plan, and the decisions in it. No torch in here."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from llmtrain.model.config import Family, GPTConfig
from llmtrain.plan.degrees import ZeroSettings
from llmtrain.plan.offload import Offload
from llmtrain.plan.offloaded_gradients import offload_of
from llmtrain.plan.placement import OptimizerBackend
from llmtrain.plan.plan import Plan
from llmtrain.recipe.load import as_data
from llmtrain.recipe.schema import Recipe
from llmtrain.recipe.zero import QuantizeConfig, ZeroConfig

_UNUSED: dict[Family, tuple[str, ...]] = {
    "gpt2": ("rope_theta", "rope_scaling", "rotary_fraction"),
    "llama": ("activation",),
    "neox": (),
}
"""Keys that do not apply to a family; they are null in a record."""

_OFFLOAD = ("share", "spare", "spare_weights", "bucket", "overlap")
"""Keys of `offload` whose names and values in a plan are those of the recipe."""

_WAY_TO_START = "checkpoint.resume"
"""Its auto is a value, and not left open."""

_FORMATS = {0: "none", 4: "int4", 8: "int8"}


def record_of(recipe: Recipe, zero: ZeroSettings, backend: OptimizerBackend, plan: Plan) -> dict[str, Any]:
    """Return the recipe as plain data, with the plan's values for the keys that it leaves open.

    Two values stay auto: a `cluster` without a description, and `checkpoint.resume`, where it is a way to start.
    """
    record = as_data(replace(recipe, cluster=plan.cluster or "auto"))
    record["model"].update(_model_keys(plan.model), preset=None)
    training = plan.training
    record["train"].update(microbatch=plan.batch.microbatch, attention=training.attention, compile=training.compile)
    record["precision"]["compute"] = plan.compute
    record["parallel"]["data"] = zero.degrees.ranks
    record["pipeline"].update(
        chunks=plan.pipeline.schedule.chunks, limit=plan.pipeline.limit, split=list(plan.pipeline.layers)
    )
    record["zero"].update(_zero_keys(zero))
    record["quantize"].update(_quantize_keys(zero))
    record["optimizer"]["backend"] = backend
    offload = plan.sharding.offload
    given = asdict(recipe.offload)
    record["offload"].update({key: getattr(offload, key) for key in _OFFLOAD if given[key] == "auto"})
    record["offload"]["gradients"] = offload_of(recipe, plan.device, plan.compute).gradients
    if offload != Offload():
        record["offload"].update(bucket=offload.bucket)
    if paths := offload.paths or plan.activation_offload.paths:
        record["offload"].update(paths=list(paths))
    if recipe.activation_checkpointing == "auto":
        every = list(plan.pipeline.recompute)
        record["activation_checkpointing"] = {"every": every[0] if len({*every}) == 1 else every}
    return record


def _model_keys(model: GPTConfig) -> dict[str, Any]:
    return {**asdict(model), **dict.fromkeys(_UNUSED[model.family])}


def _zero_keys(zero: ZeroSettings) -> dict[str, Any]:
    degrees = zero.degrees
    partition = {"weights": degrees.weights, "gradients": degrees.gradients, "optimizer": degrees.optimizer}
    other = {"hierarchical": zero.hierarchical, "resident": zero.resident}
    return {"partition": partition, "secondary": degrees.secondary, **other}


def _quantize_keys(zero: ZeroSettings) -> dict[str, Any]:
    packed = zero.quantization
    bits = {"weights": packed.weights, "secondary": packed.secondary, "gradients": packed.gradients}
    return {key: _FORMATS[value] for key, value in bits.items()}


def decisions(recipe: Recipe, record: Mapping[str, Any]) -> list[str]:
    """Return the decisions in a plan's record, as lines `key: auto -> value`. The model's sizes share one line; so do
    the degrees of model states, which are left out if the recipe sets none. Keys without effect are left out."""
    old, new = dict(_flat(as_data(recipe))), dict(_flat(record))
    idle = set(_idle(new))
    lines, sizes, sharding = [], [], []
    silent = ("model", "cluster") if recipe.parallel.pipeline > 1 else ("model", "cluster", "pipeline")
    for key, value in new.items():
        section, _, name = key.partition(".")
        if section in ("zero", "quantize"):
            sharding += [f"{name.removeprefix('partition.')}={_shown(value)}"] if old.get(key) != value else []
        elif section == "model" and old.get(key) != value and value is not None:
            sizes.append(f"{name}={_shown(value)}")
        elif section not in silent and key not in idle and old.get(key) != value:
            # A section may take the place of a word, as {every: k} does of auto.
            given = key if key in old else key.rpartition(".")[0]
            value = value if key in old else {key.rpartition(".")[2]: value}
            lines.append(f"{given}: {_shown(old.get(given))} -> {_shown(value)}")
    if sizes:
        origin = recipe.model.preset or recipe.model.hf or recipe.model.family
        lines.insert(0, f"model: {origin} -> {' '.join(sizes)}")
    if sharding and (recipe.zero, recipe.quantize) != (ZeroConfig(), QuantizeConfig()):
        lines.append(f"zero, quantize: {recipe.zero.preset or 'as given'} -> {' '.join(sharding)}")
    return lines


def _idle(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a flat record that decide nothing with the others as they are."""
    if record["train.attention"] == "torch":
        # On CPUs, and on GPUs before kernels are timed.
        yield "train.attention"
    if not record["train.compile"]:
        yield "train.compile"
    if record["offload.parameters"] == "none":
        yield "offload.gradients"
    if record["offload.optimizer"] == "none" or not record["offload.spare"]:
        yield "offload.spare_weights"
    if record["offload.optimizer"] == "none":
        yield from ("offload.share", "offload.spare", "offload.overlap")
        if record["offload.parameters"] == record["offload.gradients"] == "none":
            yield "offload.bucket"


def record_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the differences between the records of an earlier and a later plan, as lines `key: value -> value`. Keys
    that only one of them has, those that an earlier version left open, and the cluster, are left out."""
    old = {key: value for key, value in _flat(before) if value != "auto" or key == _WAY_TO_START}
    found = [(key, old[key], value) for key, value in _flat(after) if key in old and old[key] != value]
    return [f"{key}: {_shown(was)} -> {_shown(now)}" for key, was, now in found if not key.startswith("cluster")]


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {inner}" for key, inner in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)
