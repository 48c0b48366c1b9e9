"""A pipeline stage: the part of the model that one rank computes at a time."""

from collections.abc import Sequence

from torch import Tensor

from llmtrain.model.gpt import GPT
from llmtrain.plan.pipeline.stage_layout import StageLayout


def keep(model: GPT, stage_layouts: Sequence[StageLayout]) -> None:
    """Remove all units but those of `stage_layouts` from a model on the meta device."""
    kept = {name for stage_layout in stage_layouts for name in stage_layout.units}
    for name in [name for name in model.blocks if f"blocks.{name}" not in kept]:
        del model.blocks[name]
    for name in ("embedding", "head"):
        if name not in kept:
            setattr(model, name, None)


class Stage:
    """One stage of a model.

    blank: `[1]` of the compute dtype, which takes the place of the stage's input if the first group of blocks keeps the
    input by itself; None where autograd keeps it.
    """

    def __init__(self, model: GPT, stage_layout: StageLayout, blank: Tensor | None = None) -> None:
        self.model, self.layout = model, stage_layout
        has_groups = stage_layout.first < stage_layout.end and not stage_layout.opens
        self._blank = blank if has_groups else None

    def forward(self, given: Tensor, targets: Tensor | None) -> Tensor:
        """Map activations to activations. The first stage takes tokens, int64 `[batch, sequence]`; the last one returns
        the mean loss of `targets`, of the same shape."""
        x = self.model.embedding(given) if self.layout.opens else given
        x = self.model.run(x, self.layout.first, self.layout.end)
        if self._blank is not None and given.requires_grad:
            # For the gradient, autograd needs the shape alone.
            given.data = self._blank.expand(given.shape)
        return self.model.finish(x, targets) if self.layout.closes else x
