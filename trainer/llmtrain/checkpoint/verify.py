"""Verifying a whole checkpoint, byte by byte."""

from pathlib import Path

from llmtrain.checkpoint.manifest import MANIFEST, SIDECAR, Piece
from llmtrain.checkpoint.plain_file import DamagedError
from llmtrain.checkpoint.read import CheckpointReader


def verify(folder: Path) -> list[str]:
    """Return what is wrong with the checkpoint in `folder`, one sentence per file or tensor; none if it is
    sound.

    Reads every byte, and names files that are missing, too long, too short or too many.
    """
    try:
        reader = CheckpointReader(folder)
    except DamagedError as error:
        return [str(error)]
    with reader:
        expected = {*reader.manifest.files, MANIFEST, SIDECAR}
        extra = sorted({path.name for path in folder.iterdir()} - expected)
        problems = [f"{name} is not part of the checkpoint" for name in extra]
        unreadable = set()
        for name in reader.manifest.files:
            try:
                reader.file(name)
            except DamagedError as error:
                problems.append(str(error))
                unreadable.add(name)
        for name, tensor in reader.manifest.tensors.items():
            for state, pieces in tensor.states.items():
                for piece in pieces:
                    if piece.file not in unreadable:
                        problems += _problems(reader, f"{name} ({state})", piece)
    return problems


def _problems(reader: CheckpointReader, what: str, piece: Piece) -> list[str]:
    problems = []
    for index in range(len(piece.xxh3)):
        try:
            reader.block(what, piece, index)
        except DamagedError as error:
            problems.append(str(error))
    return problems
