"""Every `auto` and every key left open, made concrete. Pure: what it has to know comes in as `Facts`."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import sqrt
from typing import Any, Literal

from omegaconf import OmegaConf

from llmtrain.cluster.description import Cluster
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.levels import Degrees
from llmtrain.cluster.parallel import ParallelConfig
from llmtrain.cluster.quantity import quantity
from llmtrain.cluster.tiers import Tier, axis_tiers, tiers
from llmtrain.cluster.topology import layout_degrees, stage_speeds
from llmtrain.errors import BadInputError
from llmtrain.model.config import Family, GPTConfig, ModelConfig
from llmtrain.model.presets import PRESETS
from llmtrain.optim.config import PrecisionConfig
from llmtrain.plan.degrees import STATES_SHARE, degrees_of, resolve_zero
from llmtrain.plan.pipeline.layer_split import split_layers, stage_costs
from llmtrain.plan.pipeline.schedules import schedule_problems
from llmtrain.plan.pipeline.stage_layout import open_schedule, stage_layouts_of, units_of
from llmtrain.recipe.load import recipe_adapter
from llmtrain.recipe.pipeline import PipelineConfig
from llmtrain.recipe.schema import EveryK, Recipe
from llmtrain.recipe.zero import QuantizeConfig, ZeroConfig

_SIZES = tuple(entry.name for entry in fields(GPTConfig))
_UNUSED: dict[Family, dict[str, float | str]] = {
    "gpt2": {"rope_theta": 10_000.0, "rotary_fraction": 1.0},
    "llama": {"activation": "swiglu"},
    "neox": {},
}
"""Keys that do not apply to a family (null in a resolved recipe), and what stands for them in `GPTConfig`."""


@dataclass(frozen=True)
class Facts:
    """What resolving a recipe depends on besides the recipe.

    world: number of ranks. ranks_per_node: those started on each machine, None for all of them. device: what they
    compute on. apex: whether NVIDIA's apex is installed. cluster: what the key `cluster` describes. tokenizer: size of
    the vocabulary of `data.tokenizer`, if that is given. hf: shape of the model in `model.hf`, if that is given.
    speeds: of the pipeline's ranks, where they were measured.
    """

    world: int
    device: Literal["cpu", "cuda"]
    ranks_per_node: int | None = None
    apex: bool = False
    cluster: Cluster | None = None
    tokenizer: int | None = None
    hf: GPTConfig | None = None
    speeds: tuple[float, ...] | None = None

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers of links between the ranks, fastest first. Raises BadInputError where the cluster does not fit."""
        return tiers(self.cluster, self.world, self.ranks_per_node or self.world)


def resolve(recipe: Recipe, facts: Facts) -> Recipe:
    """Return the recipe with nothing left to decide; a resolved recipe comes back as it is.

    Raises BadInputError where a choice is impossible.
    """
    config = _model_shape(recipe, facts)
    layout = Layout(layout_degrees(recipe.parallel, facts.world))
    data = layout.degree(Axis.DATA)
    train, backend, compute = recipe.train, recipe.optimizer.backend, recipe.precision.compute
    if train.microbatch == "auto":
        train = replace(train, microbatch=_microbatch(replica_share(recipe, data), layout.degree(Axis.PIPELINE)))
    if backend == "auto":
        backend = "apex" if facts.apex and facts.device == "cuda" else "torch"
    if compute == "auto":
        compute = "bf16" if facts.device == "cuda" else "fp32"
    precision, parallel = replace(recipe.precision, compute=compute), replace(recipe.parallel, data=data)
    pipeline = _pipeline(recipe, config, facts, layout)
    fits = _fits(facts.cluster, _largest_share(config, pipeline, parallel), _compute_bytes(precision))
    zero, quantize = resolve_zero(recipe, data, axis_tiers(facts.tiers, layout, Axis.DATA), fits)
    return replace(
        recipe,
        model=_model_section(recipe.model, config),
        train=train,
        precision=precision,
        parallel=parallel,
        pipeline=pipeline,
        zero=zero,
        quantize=quantize,
        optimizer=replace(recipe.optimizer, backend=backend),
        activation_checkpointing=_recompute(recipe.activation_checkpointing, max(decided(pipeline.split))),
        cluster=facts.cluster or "auto",
    )


def shape(recipe: Recipe) -> GPTConfig:
    """Return the concrete shape of a resolved recipe's model."""
    sizes = {key: getattr(recipe.model, key) for key in _SIZES}
    return _gpt_config({**sizes, **_UNUSED[sizes["family"]]})


def decided(value: Any) -> Any:
    """Return a value of a resolved recipe, which is not `auto`. Raises ValueError where it is."""
    if value in ("auto", "uniform", "balanced"):
        raise ValueError(f"{value} is left in a resolved recipe")
    return value


def replica_share(recipe: Recipe, data: int) -> int:
    """Return the sequences of a global batch that each of `data` replicas takes. Raises BadInputError if uneven."""
    batch = recipe.train.global_batch
    if batch % data:
        raise BadInputError(
            f"train.global_batch is {batch}; expected a multiple of the {data} data-parallel ranks, such as "
            f"{max(1, batch // data) * data}"
        )
    return batch // data


def state_bytes(recipe: Recipe) -> int:
    """Return the bytes of model states of the rank that holds most of them, for a resolved recipe, without padding."""
    parameters = _largest_share(shape(recipe), recipe.pipeline, recipe.parallel)
    return degrees_of(recipe).state_bytes(parameters, _compute_bytes(recipe.precision))


def decisions(before: Recipe, after: Recipe) -> list[str]:
    """Return what resolving decided, as lines `key: auto -> value`; the model's sizes share one line, and so do the
    degrees of model states where the recipe says anything of them."""
    old, new = dict(_flat(as_data(before))), dict(_flat(as_data(after)))
    lines, sizes, spread = [], [], []
    silent = ("model", "cluster") if after.parallel.pipeline > 1 else ("model", "cluster", "pipeline")
    for key, value in new.items():
        section, _, rest = key.partition(".")
        if section in ("zero", "quantize"):
            spread += [f"{rest.removeprefix('partition.')}={_shown(value)}"] if old.get(key) != value else []
        elif section == "model" and old.get(key) != value and value is not None:
            sizes.append(f"{rest}={_shown(value)}")
        elif section not in silent and old.get(key) != value:
            # A section may take the place of a word, as {every: k} does of auto.
            whole = key if key in old else key.rpartition(".")[0]
            value = value if key in old else {key.rpartition(".")[2]: value}
            lines.append(f"{whole}: {_shown(old.get(whole))} -> {_shown(value)}")
    if sizes:
        origin = before.model.preset or before.model.hf or before.model.family
        lines.insert(0, f"model: {origin} -> {' '.join(sizes)}")
    if spread and (before.zero, before.quantize) != (ZeroConfig(), QuantizeConfig()):
        lines.append(f"zero, quantize: {before.zero.preset or 'as given'} -> {' '.join(spread)}")
    return lines


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return what a resolved recipe has otherwise than `before`, an earlier one as plain data, as lines `key: value ->
    value`. Keys that only one of them has are left out, and the cluster."""
    old = dict(_flat(before))
    found = [(key, old[key], value) for key, value in _flat(after) if key in old and old[key] != value]
    return [f"{key}: {_shown(was)} -> {_shown(now)}" for key, was, now in found if not key.startswith("cluster")]


def as_data(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain data, as JSON and YAML can hold it; `parse_recipe` reads it back."""
    data: dict[str, Any] = recipe_adapter().dump_python(recipe, by_alias=True, mode="json")
    return data


def to_yaml(record: Mapping[str, Any]) -> str:
    """Return a recipe as plain data, what `as_data` returns, as YAML, which `load_recipe` reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(record)))


def _model_shape(recipe: Recipe, facts: Facts) -> GPTConfig:
    model = recipe.model
    given = {key: value for key in _SIZES if (value := getattr(model, key)) not in (None, "auto")}
    if model.hf is not None:
        if facts.hf is None:
            raise BadInputError(f"model.hf is {model.hf}; expected a folder with a model's config.json")
        base = asdict(facts.hf)
    elif model.preset is not None:
        base = _scaled(asdict(PRESETS[model.preset]), given)
    else:
        base = _family_defaults(given, recipe.data.sequence_length)
    if "vocab" not in given and facts.tokenizer is not None and model.hf is None:
        base["vocab"] = facts.tokenizer
    if "vocab" not in {**base, **given}:
        raise BadInputError("model.vocab is missing; set it, or set data.tokenizer, whose size it takes")
    return _gpt_config({**base, **given})


def _scaled(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Let what belongs to a size follow it when a recipe changes that size of a preset."""
    if "hidden" in given:
        base["ffn"] = _ffn(base["family"], given["hidden"])
    if "heads" in given and base["kv_heads"] == base["heads"]:
        base["kv_heads"] = given["heads"]
    return base


def _family_defaults(given: dict[str, Any], sequence_length: int) -> dict[str, Any]:
    for key in ("family", "layers", "hidden", "heads"):
        if key not in given:
            raise BadInputError(
                f"model.{key} is missing; a model of your own needs family, layers, hidden and heads "
                "(or name one with model.preset)"
            )
    family: Family = given["family"]
    return {
        "kv_heads": given["heads"],
        "ffn": _ffn(family, given["hidden"]),
        "positions": sequence_length,
        "tie_embeddings": family == "gpt2",
        "norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rotary_fraction": 0.25 if family == "neox" else 1.0,
        "activation": {"gpt2": "gelu_tanh", "llama": "swiglu", "neox": "gelu"}[family],
        "dropout": 0.0,
    }


def _fits(cluster: Cluster | None, parameters: int, compute_bytes: int) -> Callable[[Degrees], bool] | None:
    """Return whether degrees fit the memory that the cluster states, None if it states none."""
    if cluster is None or cluster.accelerator is None or cluster.accelerator.memory is None:
        return None
    room = STATES_SHARE * quantity(cluster.accelerator.memory, "byte")
    return lambda degrees: degrees.state_bytes(parameters, compute_bytes) <= room


def _compute_bytes(precision: PrecisionConfig) -> int:
    return 4 if precision.compute == "fp32" else 2


def _pipeline(recipe: Recipe, config: GPTConfig, facts: Facts, layout: Layout) -> PipelineConfig:
    pipeline, ranks = recipe.pipeline, layout.degree(Axis.PIPELINE)
    stages, costs = open_schedule(pipeline, ranks), stage_costs(config, recipe.data.sequence_length)
    if ranks == 1:
        # A recipe for many stages is fine on one rank, which is all of them.
        return replace(pipeline, chunks=1, limit=1, split=(config.layers,))
    speeds = facts.speeds or stage_speeds(facts.cluster, layout)
    if problem := schedule_problems(pipeline.schedule, ranks, stages.chunks, 1):
        raise BadInputError(problem)
    split = split_layers(
        config.layers, ranks, pipeline.split, costs, speeds, pipeline.alpha, stages.chunks, stages.folded
    )
    limit = ranks if pipeline.limit == "auto" else pipeline.limit
    return replace(pipeline, chunks=stages.chunks, limit=limit, split=split)


def _microbatch(share: int, stages: int) -> int:
    """Return the largest divisor of `share` up to 8 which leaves a pipeline enough microbatches, or else the most that
    there can be: four for each stage, so that ranks wait a fifth of the time at most."""
    least = 4 * stages if stages > 1 else 1
    return max((size for size in range(1, 9) if share % size == 0 and share // size >= least), default=1)


def _largest_share(config: GPTConfig, pipeline: PipelineConfig, parallel: ParallelConfig) -> int:
    """Return the parameters of the rank of the pipeline and the tensor axis that has most."""
    stages, split = open_schedule(pipeline, parallel.pipeline), decided(pipeline.split)
    held = [stage_layouts_of(config, stages, split, rank) for rank in range(parallel.pipeline)]
    return max(
        sum(unit.numel for unit in units_of(config, stage_layouts, 0, parallel.tensor)) for stage_layouts in held
    )


def _ffn(family: Family, hidden: int) -> int:
    """Width of the MLP: 4 x hidden; with SwiGLU 2/3 of that, up to a multiple of 256 (Touvron et al. 2023)."""
    return -(-(8 * hidden // 3) // 256) * 256 if family == "llama" else 4 * hidden


def _gpt_config(sizes: dict[str, Any]) -> GPTConfig:
    try:
        return GPTConfig.of(sizes)
    except ValueError as error:
        raise BadInputError(str(error)) from error


def _model_section(model: ModelConfig, config: GPTConfig) -> ModelConfig:
    sizes: dict[str, Any] = {**asdict(config), **dict.fromkeys(_UNUSED[config.family])}
    return ModelConfig(hf=model.hf, **sizes)


def _recompute(setting: str | EveryK, layers: int) -> Any:
    """Return the groups of activation checkpointing. layers: of the largest stage, whose activations are to be few."""
    if setting != "auto":
        return setting
    factors = [every for every in range(1, layers + 1) if layers % every == 0]
    return EveryK(every=min(factors, key=lambda every: (abs(every - sqrt(layers)), every)))


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
