"""The shape of the Hugging Face model that a recipe names. No torch in here."""

from dataclasses import replace
from pathlib import Path

from llmtrain.model.config import GPTConfig
from llmtrain.model.hf_config import read_hf_config
from llmtrain.plan.facts import Facts
from llmtrain.plan.resolve.folders import has_begun
from llmtrain.plan.resolve.model_shape import model_shape
from llmtrain.recipe.load import load_recipe
from llmtrain.recipe.schema import Recipe
from llmtrain.yaml.shipped import RECORD


def hf_shape(recipe: Recipe) -> GPTConfig | None:
    """Return the shape of the model in `model.hf`, None without one. A run that has begun with such a model resumes
    without its folder: its resolved recipe has the shape. Raises BadInputError."""
    if recipe.model.hf is None:
        return None
    folder, record = Path(recipe.model.hf), Path(recipe.logging.dir, recipe.name, RECORD)
    if folder.is_dir() or not (has_begun(recipe) and record.is_file()):
        return read_hf_config(folder)
    recorded = load_recipe(str(record))
    if recorded.model.hf is None:
        return read_hf_config(folder)
    sizes = replace(recorded, model=replace(recorded.model, hf=None, preset=None))
    return model_shape(sizes, Facts(world=1, device="cpu"))
