"""The model: plain blocks, no mesh."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmtrain.model.config import GPTConfig
from llmtrain.model.layers import Block, Embedding, Head, rotary_tables


class GPT(nn.Module):
    """Decoder-only transformer of the families gpt2, llama and neox.

    groups: blocks that activation checkpointing recomputes together, in the order of the model; empty to keep every
    activation. saving: encloses what keeps a group's input for the backward pass; takes the group's number within the
    stage.
    """

    def __init__(self, config: GPTConfig, device: torch.device, groups: Sequence[range] = ()) -> None:
        super().__init__()
        self.config, self.groups = config, tuple(groups)
        self.embedding = Embedding(config)
        # By name, because a pipeline rank keeps only some of them.
        self.blocks = nn.ModuleDict({str(index): Block(config) for index in range(config.layers)})
        self.head = Head(config)
        self.saving: Callable[[int], AbstractContextManager[object]] = lambda group: nullcontext()
        self.rotary = None if config.family == "gpt2" else rotary_tables(config, device)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits `[batch, sequence, vocab]`, or, given int64 targets like `tokens`, their mean loss (fp32)."""
        return self.finish(self.run(self.embedding(tokens), 0, self.config.layers), targets)

    def run(self, x: Tensor, first: int, end: int) -> Tensor:
        """Pass `[batch, sequence, hidden]` through the blocks from `first` up to `end`."""
        if not (self.groups and self.training and torch.is_grad_enabled()):
            return self._run(x, first, end)
        # Without dropout a block draws no random numbers, so there is no generator's state to keep.
        draws = self.config.dropout > 0
        own = [group for group in self.groups if first <= group.start < end]
        for number, group in enumerate(own):
            # `saving` applies to the input that `checkpoint` saves. It does not apply to what the blocks save, for
            # which `checkpoint` sets its own saved-tensor hooks.
            with self.saving(number):
                x = checkpoint(self._run, x, group.start, group.stop, use_reentrant=False, preserve_rng_state=draws)
        return x

    def finish(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Return logits of the last block's output, or the mean loss of `targets`."""
        return self.head(x, self.embedding.tokens if self.config.tie_embeddings else None, targets)

    def unit(self, name: str) -> nn.Module:
        """Return the module that owns the parameters of the flat unit `name`."""
        return self.get_submodule(name)

    def _run(self, x: Tensor, first: int, end: int) -> Tensor:
        for index in range(first, end):
            x = self.blocks[str(index)](x, self.rotary)
        return x
