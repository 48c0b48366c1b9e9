"""From a recipe to its plan on a described cluster, for verbs that look at a run before it starts. The data and this
machine do not matter. No torch in here."""

from collections.abc import Sequence
from pathlib import Path

from llmtrain_data.tokenizer import tokenizer_size

from llmtrain.model.hf_config import read_hf_config
from llmtrain.plan.check import check_given
from llmtrain.plan.cluster_source import ranks_of
from llmtrain.plan.facts import Facts
from llmtrain.recipe.load import load_recipe
from llmtrain.recipe.schema import Recipe


def described_run(name_or_path: str, overrides: Sequence[str], ranks: int | None) -> tuple[Recipe, Facts]:
    """Return a recipe and the facts of a run of it.

    ranks: None for as many as the cluster has, or, where nothing says how many, as one replica needs. Raises
    BadInputError.
    """
    recipe = load_recipe(name_or_path, overrides, complete=False)
    check_given(recipe)
    cluster, _, grid = ranks_of(recipe, ranks)
    tokenizer, folder = recipe.data.tokenizer, recipe.model.hf
    return recipe, Facts(
        world=grid.world,
        # The plan is for the described accelerator, whatever this machine has.
        device="cuda" if cluster is not None and cluster.accelerator is not None else "cpu",
        ranks_per_node=None if cluster is None else cluster.node.ranks,
        cluster=cluster,
        tokenizer=tokenizer_size(tokenizer) if tokenizer is not None and Path(tokenizer).is_dir() else None,
        hf=None if folder is None else read_hf_config(Path(folder)),
    )
