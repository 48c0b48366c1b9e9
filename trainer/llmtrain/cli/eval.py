"""`llmtrain eval`."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from llmtrain_data.output import say, say_json
from llmtrain_data.waiting import loading

from llmtrain.cli.arguments import Json


def eval(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_CKPT", help="Folder of a run or of a checkpoint.")],
    split: Annotated[Literal["train", "valid", "test"], typer.Option(help="Part of the data.")] = "valid",
    data: Annotated[
        str | None,
        typer.Option(help="Another prepared set.", metavar="PREFIX", show_default="the recipe's data"),
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Sequences to evaluate (0: the whole split).")] = 0,
    microbatch: Annotated[int, typer.Option(min=1, help="Sequences to compute at once.")] = 8,
    as_json: Json = False,
) -> None:
    """Print a model's loss and perplexity on a split of its data, or of another prepared set."""
    from llmtrain.inference.open import open_trained

    with loading("PyTorch") as waiting:
        model = open_trained(source, waiting)
        from llmtrain.inference.trained import evaluate_on

        result = evaluate_on(model, split, data, samples, microbatch)
    if as_json:
        say_json(result)
        return
    say(
        f"{result['split']}: loss {result['loss']:.4f}, perplexity {result['perplexity']:.2f} "
        f"(step {result['step']}, {result['samples']} samples of {result['sequence_length']} tokens, "
        f"of data.split {'/'.join(f'{share:g}' for share in result['shares'])}; "
        f"unigram entropy {result['unigram_entropy']:.4f})"
    )
