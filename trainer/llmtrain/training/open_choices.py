"""What a recipe leaves open until the ranks of its run have measured. No torch in here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmtrain.plan.facts import Facts
from llmtrain.plan.plan import Plan


@dataclass(frozen=True)
class OpenChoices:
    """What a recipe leaves open.

    attention, compile: whether `train.attention` and `train.compile` are auto. split: whether `pipeline.split` is auto.
    replan: returns the plan of the recipe for other facts. remarks: returns sentences about what a plan decides, and
    about settings in it that are likely mistakes.
    """

    attention: bool
    compile: bool
    split: bool
    replan: Callable[[Facts], Plan]
    remarks: Callable[[Plan], Sequence[str]]
