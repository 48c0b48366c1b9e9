"""`run --dry-run`: what a run would be, printed before it starts. No torch in here."""

from collections.abc import Sequence

from llmtrain_data.output import say_json, say_long

from llmtrain.plan.plan import Plan
from llmtrain.plan.summary import Summary
from llmtrain.yaml.dump import to_yaml


def print_plan(plan: Plan, summary: Summary, advice: Sequence[str], as_json: bool) -> None:
    """Print a plan's record, its figures and what is likely wrong with it: as JSON, or as YAML, whose comments hold all
    but the record, so that it can be run as a recipe."""
    if as_json:
        say_json({"recipe": plan.record, "summary": summary.as_data(), "advice": list(advice)})
        return
    comments = (f"# {sentence}\n" for sentence in advice)
    say_long("".join((summary.comments(), to_yaml(plan.record), *comments)))
