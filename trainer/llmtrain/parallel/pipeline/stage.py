"""A piece of the model as a pipeline's rank computes it."""

from collections.abc import Sequence

from torch import Tensor

from llmtrain.model.gpt import GPT
from llmtrain.plan.pipeline.stage_layout import StageLayout


def keep(model: GPT, stage_layouts: Sequence[StageLayout]) -> None:
    """Take out of `model`, which has no storage yet, all units but those of `stage_layouts`."""
    kept = {name for stage_layout in stage_layouts for name in stage_layout.units}
    for name in [name for name in model.blocks if f"blocks.{name}" not in kept]:
        del model.blocks[name]
    for name in ("embedding", "head"):
        if name not in kept:
            setattr(model, name, None)


class Stage:
    """One piece of a model, from what comes in to what goes out."""

    def __init__(self, model: GPT, stage_layout: StageLayout) -> None:
        self.model, self.layout = model, stage_layout

    def forward(self, given: Tensor, targets: Tensor | None) -> Tensor:
        """Map tokens (of the piece that opens the model) or activations to activations, or (of the one that closes it)
        to the mean loss of `targets`."""
        x = self.model.embedding(given) if self.layout.opens else given
        x = self.model.run(x, self.layout.first, self.layout.end)
        return self.model.finish(x, targets) if self.layout.closes else x
