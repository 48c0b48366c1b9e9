"""`llmtrain generate`."""

from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from llmtrain_data.output import say
from llmtrain_data.waiting import loading


def generate(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_CKPT", help="Folder of a run or of a checkpoint.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among this many of the likeliest tokens (0: all).")] = 50,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Draw among the likeliest that sum up to this.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the tokenizer.", metavar="DIR", show_default="the recipe's")
    ] = None,
) -> None:
    """Let a trained model go on from a prompt."""
    with loading("PyTorch") as waiting:
        from llmtrain.inference.generate import Sampling
        from llmtrain.inference.trained import complete, open_model

        model = open_model(source, lambda sentence: say(sentence, err=True), waiting)
        waiting.doing = lambda: "loading the tokenizer"
        texts = complete(model, prompt, max_tokens, Sampling(temperature, top_k, top_p, seed), tokenizer)
        # The prompt, once the tokenizer is there.
        first = next(texts)
    for text in chain([first], texts):
        say(text, end="")
    say()
