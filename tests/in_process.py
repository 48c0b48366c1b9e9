"""Training in the process of a test, on its CPU."""

from pathlib import Path

from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import connect
from llmtrain.plan.facts import Facts
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.prepare import check_and_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.training import loop


def train_here(recipe: Path, *overrides: str) -> Plan:
    """Train a recipe as the only rank; return its plan."""
    plan = check_and_plan(load_recipe(str(recipe), overrides), Facts(world=1, device="cpu"))
    loop.train(plan, connect(Layout({Axis.DATA: 1})), [])
    return plan
