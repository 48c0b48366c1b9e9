"""`llmtrain data`: prepare corpora, train tokenizers, inspect prepared data."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from llmtrain_data.output import say, say_table
from llmtrain_data.waiting import loading

from llmtrain.cli.arguments import Json
from llmtrain.errors import EXIT_FAILED, BadInputError

if TYPE_CHECKING:
    from llmtrain_data.corpus_options import CorpusOptions

app = typer.Typer(no_args_is_help=True, help="Prepare corpora, train tokenizers, inspect prepared data.")

Input = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        help="Text, JSONL, Parquet, CSV, TSV or Arrow file (.gz, .zst), a folder of files, hf:NAME for a dataset, a "
        "saved dataset, or stdlib for the source of Python's standard library.",
    ),
]
InputFormat = Annotated[
    Literal["auto", "text", "jsonl", "parquet", "hf"], typer.Option(help="Format of INPUT; auto goes by the file name.")
]
TextKey = Annotated[str, typer.Option(help="Field or column that holds the text.", metavar="NAME")]
Glob = Annotated[str, typer.Option(help="Which files of a folder to read.", metavar="PATTERN")]
Separator = Annotated[
    str | None,
    typer.Option(help="Separator of documents in a text file; \\n stands for a line end.", metavar="TEXT"),
]
DatasetSplit = Annotated[str, typer.Option(help="Split of a Hugging Face dataset.", metavar="NAME")]
Shuffle = Annotated[
    bool,
    typer.Option(help="Read the files of a folder in a fixed shuffled order, else in order of their names."),
]
ListLeftOut = Annotated[
    bool, typer.Option("--list-left-out", help="List all files that are left out or have bytes that are not UTF-8.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]


@app.command()
def prepare(
    source: Input,
    tokenizer: Annotated[
        Path,
        typer.Option(help="Folder of a Hugging Face tokenizer; `llmtrain data tokenizer` trains one.", metavar="DIR"),
    ],
    output: Annotated[Path, typer.Option(help="Write PREFIX.bin, PREFIX.idx and PREFIX.checksums.", metavar="PREFIX")],
    input_format: InputFormat = "auto",
    text_key: TextKey = "text",
    glob: Glob = "*",
    separator: Separator = None,
    dataset_split: DatasetSplit = "train",
    shuffle: Shuffle = True,
    bos: Annotated[
        bool, typer.Option(help="Prepend the beginning-of-text id to each document, if the tokenizer does so.")
    ] = True,
    eod: Annotated[bool, typer.Option(help="Append the end-of-text id to each document.")] = True,
    encoder: Annotated[
        Literal["auto", "gigatoken", "tokenizers"],
        typer.Option(help="Encoder; auto takes gigatoken where it gives the same ids as tokenizers."),
    ] = "auto",
    workers: Annotated[int | None, typer.Option(min=1, help="Cores to use.", metavar="N", show_default="all")] = None,
    list_left_out: ListLeftOut = False,
    overwrite: Overwrite = False,
) -> None:
    """Encode a corpus into Megatron's indexed format (PREFIX.bin, PREFIX.idx), with checksums.

    The pair appears when it is complete; stopped at any moment, the same command starts over.
    """
    with loading("the libraries") as waiting:
        from llmtrain_data.corpus import open_corpus
        from llmtrain_data.prepare import PrepareOptions
        from llmtrain_data.prepare import prepare as prepare_corpus

        options = PrepareOptions(
            prepend_begin=bos, append_end=eod, overwrite=overwrite, encoder=encoder, workers=workers
        )
        waiting.doing = lambda: f"opening {source}"
        corpus = open_corpus(source, _options(input_format, text_key, glob, separator, dataset_split, shuffle))
    say(f"input      {corpus.description}")
    done = prepare_corpus(corpus, tokenizer, output, options)
    say("\n".join([*done.lines(output), *corpus.left_out.lines(list_left_out)]))


@app.command()
def tokenizer(
    source: Input,
    vocab_size: Annotated[int, typer.Option(help="Number of ids, at least 257.", metavar="N")],
    output: Annotated[Path, typer.Option(help="Folder to write.", metavar="DIR")],
    input_format: InputFormat = "auto",
    text_key: TextKey = "text",
    glob: Glob = "*",
    separator: Separator = None,
    dataset_split: DatasetSplit = "train",
    shuffle: Shuffle = True,
    sample_mb: Annotated[int, typer.Option(min=1, help="Learn from the first N MB of text.", metavar="N")] = 1000,
    list_left_out: ListLeftOut = False,
    overwrite: Overwrite = False,
) -> None:
    """Train a byte-level BPE tokenizer, of the same kind as GPT-2's, as a Hugging Face folder."""
    with loading("the libraries") as waiting:
        from llmtrain_data.corpus import open_corpus
        from llmtrain_data.tokenizer import check_new_tokenizer, sampled_texts, train_tokenizer

        check_new_tokenizer(vocab_size, output, overwrite)
        waiting.doing = lambda: f"opening {source}"
        corpus = open_corpus(source, _options(input_format, text_key, glob, separator, dataset_split, shuffle))
    say(f"input      {corpus.description}")
    size = train_tokenizer(sampled_texts(corpus, sample_mb * 10**6), vocab_size, output, overwrite)
    short = "" if size == vocab_size else f" (the input has no more than that; {vocab_size} were asked for)"
    say("\n".join([f"wrote      {output}, {size} ids{short}", *corpus.left_out.lines(list_left_out)]))


@app.command()
def inspect(
    prefix: Annotated[Path, typer.Argument(metavar="PREFIX", help="Path of the pair, without .bin.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer to show the first documents with.", metavar="DIR")
    ] = None,
    documents: Annotated[
        int | None, typer.Option(min=0, help="Number of documents to show.", metavar="N", show_default="3")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the data to its checksums instead; exit code 1 if it is damaged.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the content of a prepared data set: counts, lengths, entropy and the first documents."""
    from llmtrain_data.describe import describe
    from llmtrain_data.verify import verify as verify_set

    if verify:
        if tokenizer is not None or documents is not None:
            raise BadInputError("--verify shows no documents; leave out --tokenizer and --documents")
        verification = verify_set(prefix)
        if json:
            say(verification.json())
        else:
            say_table((), verification.facts())
        raise typer.Exit(EXIT_FAILED if verification.damaged else 0)
    description = describe(prefix, tokenizer, 3 if documents is None else documents)
    if json:
        say(description.json())
        return
    say_table((), description.facts())
    for number, text in enumerate(description.shown):
        say(f"--- {number}\n{text}")


@app.command()
def checksum(
    prefix: Annotated[Path, typer.Argument(metavar="PREFIX", help="Path of the pair, without .bin.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing checksums.")] = False,
) -> None:
    """Write PREFIX.checksums for a pair without them. The pair is taken to be undamaged as it is now."""
    from llmtrain_data import units
    from llmtrain_data.checksums import CHECKSUM_BLOCK, checksums_path
    from llmtrain_data.verify import write_checksums

    blocks = write_checksums(prefix, overwrite)
    say(f"wrote      {checksums_path(prefix)}, {blocks:,} blocks of {units.size(CHECKSUM_BLOCK)}")


@app.command()
def blend(
    parts: Annotated[
        list[str],
        typer.Argument(metavar="[WEIGHT] PREFIX ...", help="Without weights, the blend is by size."),
    ],
    tokens: Annotated[
        str | None, typer.Option(help="Tokens to train on, such as 10B.", metavar="N", show_default="one pass")
    ] = None,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens per sample.", metavar="N")] = 1024,
    split: Annotated[str, typer.Option(help="Shares of training, validation and test.", metavar="A,B,C")] = "98,1,1",
    json: Json = False,
) -> None:
    """Show how a blend is sampled, and the data section of a recipe for it."""
    from llmtrain_data.blend import COLUMNS, plan_blend

    plan = plan_blend(parts, tokens, sequence_length, split)
    if json:
        say(plan.json())
        return
    say_table(COLUMNS, plan.rows())
    if advice := plan.advice():
        say(advice)
    say(f"\n{plan.yaml}", end="")


def _options(
    input_format: str, text_key: str, glob: str, separator: str | None, dataset_split: str, shuffle: bool
) -> "CorpusOptions":
    from llmtrain_data.corpus_options import CorpusOptions

    return CorpusOptions(
        input_format=input_format,
        text_key=text_key,
        glob=glob,
        separator=None if separator is None else separator.replace("\\n", "\n").replace("\\r", "\r"),
        split=dataset_split,
        shuffle=shuffle,
    )
