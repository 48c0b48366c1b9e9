"""Which tokens end a text that a model generates, in the files of a Hugging Face folder."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmtrain_data.replace import replace_file
from llmtrain_data.untrusted import UnreadableError, read_json

from llmtrain.model.hf_config import CONFIG

GENERATION = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def copy_generation(model: Path, target: Path) -> None:
    """Copy a Hugging Face model's generation_config.json. Without one, several ids that end a text, which no
    tokenizer's configuration has, are those of config.json."""
    config = _content(model / CONFIG)
    if (model / GENERATION).is_file():
        content = (model / GENERATION).read_bytes()
    elif isinstance(config.get("eos_token_id"), list):
        ids = {key: config[key] for key in _IDS if config.get(key) is not None}
        content = (json.dumps({"_from_model_config": True, **ids}, indent=2) + "\n").encode()
    else:
        return
    target.mkdir(parents=True, exist_ok=True)
    replace_file(target / GENERATION, content)


def end_tokens(folder: Path) -> set[int]:
    """Return the ids that end a text by the generation_config.json in `folder`; none without one."""
    ids = _content(folder / GENERATION).get("eos_token_id")
    return {token for token in (ids if isinstance(ids, list) else [ids]) if isinstance(token, int)}


def _content(path: Path) -> dict[str, Any]:
    with suppress(UnreadableError):
        content = read_json(path) if path.is_file() else {}
        return content if isinstance(content, dict) else {}
    return {}
