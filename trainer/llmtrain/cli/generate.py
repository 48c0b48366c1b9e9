"""`llmtrain generate`."""

from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from llmtrain_data.output import say
from llmtrain_data.waiting import loading

from llmtrain.cli.arguments import DType


def generate(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_CKPT", help="Folder of a run or of a checkpoint.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.", metavar="N")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 always takes the most likely token.", metavar="X")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the K most likely tokens (0: all).", metavar="K")] = 50,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Sample from the most likely tokens whose probabilities sum to this, at least one.",
            metavar="P",
        ),
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.", metavar="N")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the tokenizer.", metavar="DIR", show_default="the recipe's")
    ] = None,
    dtype: DType = "auto",
) -> None:
    """Generate text with a trained model."""
    from llmtrain.inference.open import open_trained

    with loading("PyTorch") as waiting:
        model = open_trained(source, waiting, dtype)
        from llmtrain.inference.generate import Sampling
        from llmtrain.inference.trained import complete

        waiting.doing = lambda: "loading the tokenizer"
        texts = complete(model, prompt, max_tokens, Sampling(temperature, top_k, top_p, seed), tokenizer)
        # The first text is the prompt; it comes after the tokenizer has been loaded.
        first = next(texts)
    for text in chain([first], texts):
        say(text, end="")
    say()
