"""`llmtrain ckpt`: list, inspect, verify and convert checkpoints."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from llmtrain_data import units
from llmtrain_data.output import say, say_json, say_table
from llmtrain_data.waiting import loading

from llmtrain.cli.arguments import Json
from llmtrain.errors import RunFailedError

app = typer.Typer(no_args_is_help=True, help="List, inspect, verify and convert checkpoints.")

RunOrCheckpoint = Annotated[Path, typer.Argument(metavar="RUN_OR_CKPT", help="Folder of a run or of a checkpoint.")]


@app.command("list")
def list_(source: RunOrCheckpoint, as_json: Json = False) -> None:
    """List a run's checkpoints, newest first."""
    from llmtrain.checkpoint.describe import list_checkpoints

    rows = list_checkpoints(source)
    if as_json:
        say_json(rows)
        return
    cells = [
        (row.get("step", "-"), _count(row), units.size_or_dash(row.get("bytes")), row["folder"], _damage(row))
        for row in rows
    ]
    say_table(("step", "tokens", "size", "folder", ""), cells)


@app.command()
def inspect(source: RunOrCheckpoint, as_json: Json = False) -> None:
    """Show the content of a checkpoint, or of a run's newest one: step, tokens, files, tensors, recipe."""
    from llmtrain.checkpoint.describe import inspect_checkpoint

    found = inspect_checkpoint(source)
    if as_json:
        say_json(found)
        return
    facts = {
        "folder": found["folder"],
        "step": found["step"],
        "tokens": _count(found),
        "parameters": f"{found['parameters']:,}",
        "states": ", ".join(found["states"]),
        **{key: json.dumps(found[key]) for key in ("progress", "model", "recipe")},
    }
    say_table((), facts.items())
    say()
    say_table(("file", "size"), [(name, units.size_or_dash(size)) for name, size in found["files"].items()])
    say()
    tensors = found["tensors"].items()
    rows = [(name, " x ".join(map(str, entry["shape"])), len(entry["ranges"])) for name, entry in tensors]
    say_table(("tensor", "shape", "ranges"), rows)


@app.command()
def verify(source: RunOrCheckpoint, as_json: Json = False) -> None:
    """Compare every byte of every checkpoint to its checksums; exit code 1 if anything is damaged or cannot be read."""
    from llmtrain.checkpoint.describe import existing

    folders = existing(source)
    with loading("PyTorch"):
        from llmtrain.checkpoint.deleted import DeletedError
        from llmtrain.checkpoint.verify import verify as verify_one

    results, deleted = {}, []
    for folder in folders:
        try:
            results[str(folder)] = verify_one(folder)
        except DeletedError:
            deleted.append(folder)
    if as_json:
        say_json({name: found.problems for name, found in results.items()})
    else:
        for name, found in results.items():
            say("\n".join(f"{name}: {problem}" for problem in found.problems) or f"{name}: sound")
        for gone in deleted:
            say(f"{gone}: deleted by its run meanwhile (checkpoint.keep)")
    damaged = sum(bool(found.damage) for found in results.values())
    unread = sum(bool(found.unread and not found.damage) for found in results.values())
    sentences = [
        f"{damaged} of {len(results)} checkpoints in {source} are damaged; remove them: a run resumes from the newest "
        "sound one",
        f"{unread} of {len(results)} checkpoints in {source} cannot be read whole and may be sound; see to their disk "
        "or permissions, and verify again",
    ]
    if damaged or unread:
        raise RunFailedError("; ".join(one for one, count in zip(sentences, (damaged, unread), strict=True) if count))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A run, a checkpoint or a Hugging Face folder.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to create.")],
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"], typer.Option(help="Dtype of exported weights; imported weights are fp32.")
    ] = "fp32",
    max_shard_size: Annotated[str, typer.Option(help="Largest size of an exported file.", metavar="SIZE")] = "5GB",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer to export.", metavar="DIR", show_default="the run's")
    ] = None,
    as_json: Json = False,
) -> None:
    """Export a checkpoint as a Hugging Face folder, or import one as a checkpoint; SRC decides which."""
    from llmtrain.checkpoint.convert.convert import convert as convert_folder

    made = convert_folder(source, target, dtype, max_shard_size, tokenizer)
    if as_json:
        say_json(asdict(made))
    else:
        say(made.sentence)


def _damage(row: dict[str, object]) -> str:
    if "unreadable" in row:
        return f"cannot be read: {row['unreadable']}"
    return f"damaged: {row['damage']}" if "damage" in row else ""


def _count(row: dict[str, object]) -> str:
    tokens = row.get("tokens")
    return "-" if tokens is None else f"{tokens:,}"
