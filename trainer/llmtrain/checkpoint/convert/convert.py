"""Convert a checkpoint to a Hugging Face folder, or a Hugging Face folder to a checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmtrain_data.waiting import loading

from llmtrain.checkpoint.convert.target import refuse_existing
from llmtrain.checkpoint.convert.tokenizer import has_tokenizer, unreadable
from llmtrain.checkpoint.folder import find_checkpoints
from llmtrain.cluster.quantity import quantity
from llmtrain.errors import BadInputError
from llmtrain.model.hf_config import CONFIG

SHARD = "5GB"


@dataclass(frozen=True)
class Converted:
    """The result. kind: of `folder`. source: the checkpoint or Hugging Face folder that was converted."""

    kind: Literal["checkpoint", "hugging face"]
    folder: str
    source: str
    sentence: str


def convert(source: Path, target: Path, dtype: str, max_shard_size: str, tokenizer: Path | None) -> Converted:
    """Convert `source` into the folder `target`; the kind of `source` decides the direction.

    source: a Hugging Face folder, a run's folder (for its newest checkpoint), or a checkpoint. dtype, max_shard_size
    (such as 5GB), tokenizer: of an exported model. Raises BadInputError and RunFailedError.
    """
    # Whatever is wrong with the arguments is reported before PyTorch is loaded.
    refuse_existing(target)
    shard_bytes = _bytes(max_shard_size)
    if (source / CONFIG).is_file():
        given = {
            "--dtype": (dtype, "fp32"),
            "--max-shard-size": (max_shard_size, SHARD),
            "--tokenizer": (tokenizer, None),
        }
        for option, (value, default) in given.items():
            if value != default:
                raise BadInputError(
                    f"{option} is {value}, but {source} is a Hugging Face folder, and imports use fp32, one file and "
                    "the folder's own tokenizer; leave it out"
                )
        with loading("PyTorch"):
            from llmtrain.checkpoint.convert.import_hf import import_hf
        import_hf(source, target)
        sentence = f"{target} holds a checkpoint of step 0; start a run from it with checkpoint.resume={target}"
        if has_tokenizer(source) and (problem := unreadable(target / "tokenizer")):
            sentence += f"; its tokenizer cannot be read, so `llmtrain generate` needs another one: {problem}"
        return Converted("checkpoint", str(target), str(source), sentence)
    checkpoints = find_checkpoints(source)
    if not checkpoints:
        raise BadInputError(f"{source} holds neither a checkpoint nor a Hugging Face model ({CONFIG})")
    if tokenizer is not None and not has_tokenizer(tokenizer):
        raise BadInputError(f"--tokenizer is {tokenizer}, which holds no tokenizer; expected a folder of a tokenizer")
    with loading("PyTorch"):
        from llmtrain.checkpoint.convert.export import export_hf
    export_hf(checkpoints[0], target, dtype, shard_bytes, tokenizer)
    sentence = f"{target} holds {checkpoints[0].name} as a Hugging Face model in {dtype}"
    return Converted("hugging face", str(target), str(checkpoints[0]), sentence)


def _bytes(size: str) -> int:
    text = size.strip().upper()
    try:
        return max(int(quantity(f"{text}B" if text.isdecimal() else text, "byte")), 1)
    except ValueError:
        raise BadInputError(f"--max-shard-size is {size!r}; expected a size above zero, such as 5GB or 500MB") from None
