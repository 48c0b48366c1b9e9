"""What `make gpu` and `make gpu-offload` train on one GPU."""

from dataclasses import dataclass
from functools import partial
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Part:
    """A row of the table. batch: sequences of a step of each rank. world: number of ranks; of several, the first trains
    without the others. microbatch: sequences of a microbatch, None for all of the step.
    seconds: the part's time limit. profiled: whether a profile of a step is written. peer: what trains it with
    torch.compile in place of llmtrain: transformers, or plain torch."""

    name: str
    preset: str
    keys: tuple[str, ...] = ()
    sequence: int = 1024
    batch: int = 8
    seconds: int = 120
    steps: int = 10
    profiled: bool = False
    microbatch: int | None = None
    peer: Literal["", "transformers", "plain"] = ""
    world: int = 1

    @property
    def slug(self) -> str:
        """The name of its files."""
        return self.name.replace(",", "").replace(" ", "-")


COMPILED, RECOMPUTED = "train.compile=true", "activation_checkpointing=full"
# A fresh model's gradients would be clipped, and then nothing is stepped before the norm is known.
NO_CLIP = "optimizer.clip=0"
HOST = ("offload.optimizer=host",)
BREADTH_FIRST = "pipeline.schedule=breadth-first"
# Stepped before the norm is known. States of 8B that are stepped ahead do not fit 128 GiB of host memory too.
AHEAD, NOT_AHEAD = ("offload.spare=1", "offload.spare_weights=device"), "offload.spare=0"
PARTS = (
    Part(name="124M", preset="gpt2-124m", keys=(), sequence=1024, batch=64, profiled=True),
    Part(name="124M, small batch", preset="gpt2-124m", keys=(), sequence=1024, batch=16),
    Part(name="350M", preset="gpt2-355m", keys=(), sequence=1024, batch=32, profiled=True),
    Part(name="1B", preset="llama3.2-1b", keys=(), sequence=2048, batch=16, microbatch=8, profiled=True),
    Part(name="1B, small batch", preset="llama3.2-1b", keys=(), sequence=2048, batch=4),
    Part(
        name="8B, one rank of 8 without its links",
        preset="llama3-8b",
        keys=("zero.stage=3", NO_CLIP),
        sequence=2048,
        batch=4,
        microbatch=2,
        seconds=200,
        steps=5,
        profiled=True,
        world=8,
    ),
    Part(name="124M, compiled", preset="gpt2-124m", keys=(COMPILED,), sequence=1024, batch=64),
    Part(
        name="124M, small batch, compiled", preset="gpt2-124m", keys=(COMPILED,), sequence=1024, batch=16, profiled=True
    ),
    Part(name="1B, small batch, compiled", preset="llama3.2-1b", keys=(COMPILED,), sequence=2048, batch=4),
    Part(
        name="124M, small batch, plain torch and torch.compile",
        preset="gpt2-124m",
        keys=(),
        sequence=1024,
        batch=16,
        peer="plain",
    ),
    Part(
        name="124M, small batch, transformers and torch.compile",
        preset="gpt2-124m",
        keys=(),
        sequence=1024,
        batch=16,
        peer="transformers",
    ),
    Part(
        name="1B, small batch, transformers and torch.compile",
        preset="llama3.2-1b",
        keys=(),
        sequence=2048,
        batch=4,
        peer="transformers",
    ),
    Part(name="1B, recomputed", preset="llama3.2-1b", keys=(RECOMPUTED,), sequence=2048, batch=16, microbatch=8),
    Part(name="124M, microbatches of 16", preset="gpt2-124m", sequence=1024, batch=64, microbatch=16),
    # No rows of padding are copied.
    Part(name="124M, vocabulary of 50304", preset="gpt2-124m", keys=("model.vocab=50304",), sequence=1024, batch=64),
)
# States that rest on the host, and the same model without offload where it fits.
_3b = partial(Part, preset="llama3.2-3b", sequence=2048, batch=32, seconds=200, steps=5)
OFFLOAD = (
    # As many tokens as the GPU computes while the CPU steps 3B parameters, in one microbatch: only the last one's
    # backward pass has complete gradients, which are stepped meanwhile.
    Part(name="3B", preset="llama3.2-3b", keys=(RECOMPUTED, NO_CLIP), sequence=2048, batch=32, seconds=150, steps=5),
    _3b(name="3B, states on the host", keys=(RECOMPUTED, NO_CLIP, *HOST, *AHEAD)),
    # Those of the first layers stay: nothing hides their steps.
    _3b(
        name="3B, four fifths of the states on the host",
        keys=(RECOMPUTED, NO_CLIP, *HOST, *AHEAD, "offload.share=0.8"),
    ),
    # With several microbatches, all of which pass a layer before the next one, most gradients are complete early.
    _3b(
        name="3B, states on the host, breadth-first",
        keys=(RECOMPUTED, NO_CLIP, *HOST, *AHEAD, BREADTH_FIRST),
        microbatch=4,
    ),
    Part(
        name="8B, states on the host",
        preset="llama3-8b",
        keys=(RECOMPUTED, NO_CLIP, *HOST, NOT_AHEAD),
        sequence=2048,
        batch=4,
        seconds=300,
        steps=3,
        profiled=True,
    ),
    # The largest that one H200 and 128 GiB of its host's memory hold, with 16-bit sums of gradients: 15.6B parameters.
    Part(
        name="16B, states on the host and the GPU",
        preset="llama2-13b",
        keys=(
            "model.layers=48",
            RECOMPUTED,
            NO_CLIP,
            *HOST,
            NOT_AHEAD,
            "offload.share=0.62",
            "precision.gradients=compute",
        ),
        sequence=2048,
        batch=8,
        microbatch=4,
        seconds=300,
        steps=3,
    ),
)
_tiny = partial(Part, preset="llama-1m", sequence=64, batch=2, seconds=300, steps=1)
TINY = (
    _tiny(name="tiny", profiled=True),
    _tiny(name="tiny, one rank of 8 without its links", keys=("zero.stage=3",), world=8),
    _tiny(name="tiny, states outside", keys=HOST),
    _tiny(name="tiny, transformers and torch.compile", peer="transformers"),
    _tiny(name="tiny, plain torch and torch.compile", preset="gpt2-1m", peer="plain"),
    _tiny(name="tiny, refused", keys=("zero.stage=9",)),
)
