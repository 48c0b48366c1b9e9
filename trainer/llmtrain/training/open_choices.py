"""What a recipe leaves open until the ranks of its run have measured. No torch in here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmtrain.plan.facts import Facts
from llmtrain.plan.plan import Plan


@dataclass(frozen=True)
class OpenChoices:
    """What a recipe leaves open.

    attention: `train.attention` of the recipe, auto or a kernel. split: whether `pipeline.split` is auto. replan:
    returns the plan of the recipe for other facts. decisions: returns sentences about what a plan decides.
    """

    attention: str
    split: bool
    replan: Callable[[Facts], Plan]
    decisions: Callable[[Plan], Sequence[str]]
