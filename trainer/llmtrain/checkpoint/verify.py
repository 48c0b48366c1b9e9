"""Verifying a whole checkpoint, byte by byte."""

from pathlib import Path

from llmtrain_data.progress import Report, progress

from llmtrain.checkpoint.manifest import MANIFEST, SIDECAR, StoredRange
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
        found = [
            (f"{name} ({state})", piece)
            for name, tensor in reader.manifest.tensors.items()
            for state, pieces in tensor.states.items()
            for piece in pieces
            if piece.file not in unreadable
        ]
        with progress(f"verify {folder.name}", sum(piece.nbytes for _, piece in found), "bytes") as report:
            for what, piece in found:
                problems += _problems(reader, what, piece, report)
    return problems


def _problems(reader: CheckpointReader, what: str, piece: StoredRange, report: Report) -> list[str]:
    problems = []
    for index in range(len(piece.xxh3)):
        report(min(reader.manifest.block, piece.nbytes - index * reader.manifest.block))
        try:
            reader.block(what, piece, index)
        except DamagedError as error:
            problems.append(str(error))
    return problems
