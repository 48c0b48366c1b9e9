"""From a recipe to its plan on a described cluster, for commands that look at a run before it starts. The data and this
machine do not matter. No torch in here."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from llmtrain_data.tokenizer import tokenizer_size

from llmtrain.plan.facts import Facts
from llmtrain.plan.flops import computes_bf16, is_amd
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.check import check_given
from llmtrain.plan.resolve.cluster_source import ranks_of
from llmtrain.plan.resolve.folders import has_begun
from llmtrain.plan.resolve.hf_shape import hf_shape
from llmtrain.recipe.load import load_recipe
from llmtrain.recipe.schema import Recipe


def described_run(name_or_path: str, overrides: Sequence[str], ranks: int | None) -> tuple[Recipe, Facts]:
    """Return a recipe and the facts of a run of it.

    ranks: None for as many as the cluster has, or, where nothing says how many, as one replica needs. Raises
    BadInputError.
    """
    recipe = load_recipe(name_or_path, overrides, complete=False)
    check_given(recipe)
    topology = ranks_of(recipe, ranks)
    cluster = topology.cluster
    accelerator = None if cluster is None else cluster.accelerator
    tokenizer = recipe.data.tokenizer
    return recipe, Facts(
        world=topology.grid.world,
        # The plan is for the described accelerator, whatever this machine has.
        device="cuda" if accelerator is not None else "cpu",
        ranks_per_node=None if cluster is None else cluster.node.ranks,
        # As Triton is by default: what this Python has installed does not matter.
        apex=True,
        cluster=cluster,
        tokenizer=tokenizer_size(tokenizer) if tokenizer is not None and Path(tokenizer).is_dir() else None,
        hf=hf_shape(recipe),
        bf16=computes_bf16(accelerator),
        amd=accelerator is not None and is_amd(accelerator.name or ""),
    )


def assumed(recipe: Recipe, facts: Facts, plan: Plan) -> Iterator[str]:
    """Yield a sentence for each thing that a plan assumes because the recipe does not say it or this machine lacks
    it."""
    model = recipe.model
    # Without a preset, such a recipe has no plan.
    if recipe.data.tokenizer is not None and facts.tokenizer is None and model.vocab in (None, "auto") and not model.hf:
        yield (
            f"data.tokenizer is {recipe.data.tokenizer}, which is not here, so this plan has the {plan.model.vocab} "
            "ids of model.preset; set model.vocab to the tokenizer's size"
        )
    if recipe.optimizer.backend == "apex":
        yield "optimizer.backend is apex, so this plan assumes that NVIDIA's apex is installed where it runs"
    origin = plan.checkpoint.origin
    if origin is not None and not origin.folder.is_dir() and not has_begun(recipe):
        yield f"{origin.key} is {origin.folder}, which is not here, so this plan does not say whether its model fits"
    if facts.device == "cpu":
        yield (
            "no cluster file describes an accelerator, so this is the plan for CPUs; add 'cluster={accelerator: "
            "{memory: 80GB}, node: {ranks: 8}}' for GPUs"
        )
