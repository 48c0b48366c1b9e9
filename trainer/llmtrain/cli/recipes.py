"""`llmtrain recipes`: shipped recipes, their schema and the model presets."""

from dataclasses import asdict
from typing import Annotated

import typer
from llmtrain_data.output import say, say_json, say_table

from llmtrain.cli.arguments import Json

app = typer.Typer(no_args_is_help=True, help="List and show recipes, their schema and the model presets.")


@app.command("list")
def list_recipes(as_json: Json = False) -> None:
    """List the shipped recipes."""
    from llmtrain.yaml.shipped import shipped_folder, shipped_names, summary

    found = {name: summary(shipped_folder() / f"{name}.yaml") for name in shipped_names()}
    if as_json:
        say_json([{"recipe": name, "summary": text} for name, text in found.items()])
    else:
        say_table(("recipe", "what it is"), found.items())


@app.command()
def show(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name or file, or presets.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides.")] = None,
) -> None:
    """Print a recipe with the recipes that it extends and every default filled in; ??? marks values to set."""
    from llmtrain.recipe.load import as_data, load_recipe
    from llmtrain.yaml.dump import to_yaml

    if recipe == "presets":
        presets()
    else:
        say(to_yaml(as_data(load_recipe(recipe, overrides or [], complete=False))), end="")


@app.command()
def presets(as_json: Json = False) -> None:
    """List the models that model.preset accepts, with their sizes."""
    from llmtrain.model.presets import PRESETS
    from llmtrain.model.tensors import parameter_count

    sizes = ("layers", "hidden", "heads", "kv_heads", "ffn", "positions", "vocab")
    if as_json:
        models = PRESETS.items()
        say_json([{"preset": name, "parameters": parameter_count(each), **asdict(each)} for name, each in models])
        return
    rows = [
        (name, config.family, f"{parameter_count(config):,}", *(getattr(config, key) for key in sizes))
        for name, config in PRESETS.items()
    ]
    say_table(("preset", "family", "parameters", *sizes), rows)


@app.command()
def schema() -> None:
    """Print the JSON schema of a recipe, for editors."""
    from llmtrain.recipe.document import recipe_schema

    say_json(recipe_schema(), indent=2)
