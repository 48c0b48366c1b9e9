"""Sample tokens from a model."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor

from llmtrain.errors import BadInputError, RunFailedError
from llmtrain.model.gpt import GPT


@dataclass(frozen=True)
class Sampling:
    """How to draw the next token. temperature: 0 takes the most likely token. top_k: draw from this many of the most
    likely (0: all). top_p: draw from the fewest whose probabilities sum up to it, at least one (1: all; nucleus
    sampling, Holtzman et al. 2020)."""

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            if isnan(getattr(self, name)):
                raise BadInputError(f"--{name.replace('_', '-')} is nan; expected a number")


@torch.no_grad()
def generate(
    model: GPT, prompt: list[int], count: int, sampling: Sampling, stop_at: Collection[int] = ()
) -> Iterator[int]:
    """Yield up to `count` tokens after `prompt` (at least one token), and end before one of the tokens `stop_at`.

    The model sees the last `positions` tokens. Raises RunFailedError if a logit is not finite.
    """
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(sampling.seed)
    tokens = torch.tensor([prompt], device=device)
    for _ in range(count):
        x = model.run(model.embedding(tokens[:, -model.config.positions :]), 0, model.config.layers)
        logits = model.finish(x[:, -1:], None)[0, -1].float()
        if not logits.isfinite().all():
            raise RunFailedError("the model's logits are not finite numbers; its training diverged, or it is damaged")
        drawn = draw(logits, sampling, generator)
        if drawn in stop_at:
            return
        yield drawn
        tokens = torch.cat((tokens, torch.tensor([[drawn]], device=device)), dim=1)


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token id from fp32 logits `[vocab]`."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    # The largest is 0, so that a small temperature makes none infinite. A smaller one than this is 0 in fp32.
    logits = (logits - logits.max()) / max(sampling.temperature, 1e-30)
    # Stable: of equally likely tokens the first one comes first, as in argmax.
    ordered, order = logits.sort(descending=True, stable=True)
    if sampling.top_k:
        ordered = ordered[: sampling.top_k]
    probabilities = ordered.softmax(-1)
    # Keep a token if the more likely ones have not reached top_p. Keep the most likely one even if top_p is 0.
    kept = probabilities.cumsum(-1) - probabilities < sampling.top_p
    kept[0] = True
    chosen = torch.multinomial(probabilities * kept, 1, generator=generator)
    return int(order[chosen])
