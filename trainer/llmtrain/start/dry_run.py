"""`run --dry-run`: print the plan of a run, and what it resumes from. No torch in here."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from llmtrain_data.output import say, say_json

from llmtrain.checkpoint.folder import step_folders, step_of
from llmtrain.checkpoint.manifest import check_model, read_manifest
from llmtrain.checkpoint.plain_file import DamagedError
from llmtrain.plan.plan import Plan
from llmtrain.plan.views.summary import Summary
from llmtrain.recipe.schema import Recipe
from llmtrain.yaml.dump import to_yaml


def print_plan(plan: Plan, summary: Summary, advice: Sequence[str], as_json: bool) -> None:
    """Print a plan's record, its summary and the advice about it, as JSON or as YAML. In YAML, all but the record are
    comments, so that the output is a recipe."""
    if as_json:
        say_json({"recipe": plan.record, "summary": summary.as_data(), "advice": list(advice)})
        return
    comments = (f"# {sentence}\n" for sentence in advice)
    say("".join((summary.comments(), to_yaml(plan.record), *comments)), end="")


def resumption(recipe: Recipe, plan: Plan) -> list[str]:
    """Return sentences about a run that has begun: the step after which it continues, and what its recipe changes.
    Raises BadInputError if its checkpoint holds another model. plan: of the recipe."""
    # Importing it imports torch.
    from llmtrain.training.run_folder import recipe_changes

    folder = Path(plan.logging.dir, plan.name)
    # A start of the run takes what an earlier one has measured.
    measured: dict[str, object] = {
        "train.attention": recipe.train.attention,
        "train.compile": recipe.train.compile,
        "pipeline.split": recipe.pipeline.split,
    }
    for checkpoint in reversed(step_folders(folder / "checkpoints")):
        # The run skips a damaged checkpoint, and says so.
        with suppress(DamagedError):
            check_model(checkpoint, read_manifest(checkpoint), plan.model)
            step, steps = step_of(checkpoint), plan.training.steps
            left = "" if step < steps else f", and train.steps is {steps}, so that nothing is left to train"
            changes = (line for line in recipe_changes(folder, plan) if measured.get(line.partition(":")[0]) != "auto")
            return [
                f"the run continues after step {step}, from {checkpoint}{left}",
                *(f"{change}, changed since the last start" for change in changes),
            ]
    return []
