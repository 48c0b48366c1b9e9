"""Copy and read a tokenizer's files in a Hugging Face folder."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmtrain_data.errors import DataError
from llmtrain_data.replace import replace_file
from llmtrain_data.tokenizer import (
    END_OF_TEXT,
    configured_token,
    load_tokenizer,
    token_ids,
    tokenizer_identity,
    tokenizer_settings,
)

from llmtrain.checkpoint.convert.generation import GENERATION
from llmtrain.errors import BadInputError

TOKENIZER = "tokenizer.json"
_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION,
)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files that `copy_tokenizer` takes from `folder`; empty if it holds none."""
    return [folder / name for name in _FILES if (folder / name).is_file()]


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a tokenizer's files. An imported model's may hold a generation_config.json alone."""
    return any(path.name != GENERATION for path in tokenizer_files(folder))


def unreadable(folder: Path) -> str | None:
    """Return why a tokenizer cannot be read, None if it can."""
    try:
        tokenizer_identity(folder)
    except DataError as error:
        return str(error)
    return None


def copy_tokenizer(source: Path, target: Path) -> bool:
    """Copy the tokenizer's files from `source`, and replace those of `target` whole; return whether it has any."""
    present = tokenizer_files(source)
    if present:
        target.mkdir(parents=True, exist_ok=True)
    for path in present:
        if path.resolve() != (target / path.name).resolve():
            replace_file(target / path.name, path.read_bytes())
    if present and source.resolve() != target.resolve() and not (source / TOKENIZER).is_file():
        # Its class may stand in a file of the model, such as config.json. The model's folder may also have no
        # tokenizer, but a generation_config.json.
        with suppress(DataError):
            replace_file(target / TOKENIZER, load_tokenizer(source).to_str().encode())
    return bool(present)


def tokenizer_of(checkpoint: Path, recipe: Mapping[str, Any]) -> Path | None:
    """Return the folder of a checkpoint's tokenizer: the copy in its run's folder, or else the recipe's."""
    candidates = [checkpoint.resolve().parent.parent / "tokenizer"]
    data = recipe.get("data")
    if isinstance(data, dict) and isinstance(data.get("tokenizer"), str):
        candidates.append(Path(data["tokenizer"]))
    return next((folder for folder in candidates if folder.is_dir()), None)


def special_tokens(folder: Path | None) -> dict[str, int | None]:
    """Return bos_token_id and eos_token_id of the tokenizer in `folder`; None for a token that it lacks.

    Without a configured eos token it is `<|endoftext|>`, which then ends documents. Raises BadInputError if the files
    are not a tokenizer's.
    """
    if folder is None:
        return {"bos_token_id": None, "eos_token_id": None}
    try:
        ids = token_ids(folder)
        bos, eos = configured_token(folder, "bos_token"), configured_token(folder, "eos_token") or END_OF_TEXT
    except DataError as error:
        raise BadInputError(str(error)) from error
    return {"bos_token_id": None if bos is None else ids.get(bos), "eos_token_id": ids.get(eos)}


def name_class(folder: Path) -> None:
    """Name the class that reads a tokenizer.json as it is. Without a name transformers takes the class of the model's
    kind, which replaces the file's splits and adds tokens."""
    path = folder / "tokenizer_config.json"
    settings = tokenizer_settings(folder, path.name)
    if not (folder / TOKENIZER).is_file() or settings.get("tokenizer_class"):
        return
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if configured_token(folder, "eos_token") is None and END_OF_TEXT in token_ids(folder):
        settings["eos_token"] = END_OF_TEXT
    replace_file(path, (json.dumps(settings, indent=2) + "\n").encode())
