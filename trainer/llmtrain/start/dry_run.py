"""`run --dry-run`: print the plan of a run. No torch in here."""

from collections.abc import Sequence

from llmtrain_data.output import say, say_json

from llmtrain.plan.plan import Plan
from llmtrain.plan.views.summary import Summary
from llmtrain.yaml.dump import to_yaml


def print_plan(plan: Plan, summary: Summary, advice: Sequence[str], as_json: bool) -> None:
    """Print a plan's record, its summary and the advice about it, as JSON or as YAML. In YAML, all but the record are
    comments, so that the output is a recipe."""
    if as_json:
        say_json({"recipe": plan.record, "summary": summary.as_data(), "advice": list(advice)})
        return
    comments = (f"# {sentence}\n" for sentence in advice)
    say("".join((summary.comments(), to_yaml(plan.record), *comments)), end="")
