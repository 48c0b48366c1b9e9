"""The shape of a recipe's model, with the sizes that the recipe leaves out. No torch in here."""

from dataclasses import asdict, fields
from typing import Any

from llmtrain.errors import BadInputError
from llmtrain.model.config import Family, GPTConfig
from llmtrain.model.presets import PRESETS
from llmtrain.plan.facts import Facts
from llmtrain.recipe.schema import Recipe

_SIZES = tuple(entry.name for entry in fields(GPTConfig))


def model_shape(recipe: Recipe, facts: Facts) -> GPTConfig:
    """Return the shape of a recipe's model. Raises BadInputError where a size is missing or impossible."""
    model = recipe.model
    given = {key: value for key, value in asdict(model).items() if key in _SIZES and value not in (None, "auto")}
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
        if recipe.data.tokenizer is not None:
            raise BadInputError(
                f"data.tokenizer is {recipe.data.tokenizer}, which is not here; set model.vocab to its size to plan "
                "without it"
            )
        raise BadInputError("model.vocab is missing; set it, or set data.tokenizer, whose size it takes")
    return _gpt_config({**base, **given})


def _scaled(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return a preset whose ffn and kv_heads follow the hidden size and heads that the recipe changes."""
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


def _ffn(family: Family, hidden: int) -> int:
    """Return the width of the MLP: 4 x hidden; with SwiGLU 2/3 of that, rounded up to a multiple of 256 (Touvron et al.
    2023)."""
    return -(-(8 * hidden // 3) // 256) * 256 if family == "llama" else 4 * hidden


def _gpt_config(sizes: dict[str, Any]) -> GPTConfig:
    try:
        return GPTConfig.of(sizes)
    except ValueError as error:
        raise BadInputError(str(error)) from error
