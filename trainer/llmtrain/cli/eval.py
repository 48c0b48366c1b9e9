"""`llmtrain eval`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from llmtrain_data.output import say, say_json, say_table
from llmtrain_data.waiting import loading

from llmtrain.cli.arguments import DType, Json

SampleLength = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens per sequence.",
        metavar="N",
        show_default="the recipe's; of an imported model its positions, at most 4096",
    ),
]


def eval(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_CKPT", help="Folder of a run or of a checkpoint.")],
    split: Annotated[
        Literal["train", "valid", "test"] | None,
        typer.Option(
            help="Part of the data, by the recipe's data.split and data.validation.",
            show_default="valid, or with --data all documents",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Another prepared set.", metavar="PREFIX", show_default="the recipe's data"),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(min=0, help="Sequences to evaluate, of a blend by its weights (0: all, each once).", metavar="N"),
    ] = 0,
    sequence_length: SampleLength = None,
    microbatch: Annotated[int, typer.Option(min=1, help="Sequences to compute at once.", metavar="N")] = 8,
    dtype: DType = "auto",
    as_json: Json = False,
) -> None:
    """Print a model's loss and perplexity on a split of its data, or on another prepared set.

    Of all sequences of a blend, a row for each source has its own loss. The loss in the first line is the mean of
    these, weighted by the blend's weights.
    """
    from llmtrain.inference.open import open_trained

    with loading("PyTorch") as waiting:
        model = open_trained(source, waiting, dtype)
        from llmtrain.inference.trained import evaluate_on

        result = evaluate_on(model, split, data, samples, microbatch, sequence_length)
    if as_json:
        say_json(result)
    else:
        _say(result)


def _say(result: Mapping[str, Any]) -> None:
    shares, sources = result["shares"], result.get("sources", [])
    part = (
        f", of data.split {'/'.join(f'{share:g}' for share in shares)}"
        if shares
        else f", all of {', '.join(result['sets'])}"
    )
    say(
        f"{result['split']}: loss {result['loss']:.4f}, perplexity {result['perplexity']:.2f} "
        f"(step {result['step']}, {result['samples']} samples of {result['sequence_length']} tokens{part}; "
        f"unigram entropy {result['unigram_entropy']:.4f}{'; mean of the sources by weight' if sources else ''})"
    )
    if sources:
        say_table(
            ("source", "weight", "samples", "loss", "perplexity"),
            [
                (
                    each["source"],
                    f"{each['weight']:.2%}",
                    f"{each['samples']}",
                    f"{each['loss']:.4f}",
                    f"{each['perplexity']:.2f}",
                )
                for each in sources
            ],
        )
