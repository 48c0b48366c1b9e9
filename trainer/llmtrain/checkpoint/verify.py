"""Verify every byte of a checkpoint."""

from collections import defaultdict
from pathlib import Path

from llmtrain_data.progress import Report, progress

from llmtrain.checkpoint.deleted import DeletedError
from llmtrain.checkpoint.manifest import MANIFEST, SIDECAR, StoredRange
from llmtrain.checkpoint.plain_file import DamagedError
from llmtrain.checkpoint.read import CheckpointReader


def verify(folder: Path) -> list[str]:
    """Return the problems of the checkpoint in `folder`, one sentence per file or block; empty if it is sound.

    Reads every byte, and also finds files that are missing, too long, too short or not part of the checkpoint. Raises
    DeletedError if the folder is not there at the end.
    """
    try:
        problems = _problems_in(folder)
    except (DamagedError, FileNotFoundError) as error:
        problems = [str(error)]
    if problems and not folder.is_dir():
        raise DeletedError(folder)
    return problems


def _problems_in(folder: Path) -> list[str]:
    with CheckpointReader(folder) as reader:
        expected = {*reader.manifest.files, MANIFEST, SIDECAR}
        extra = sorted({path.name for path in folder.iterdir()} - expected)
        problems = [f"{name} is not part of the checkpoint" for name in extra]
        placed = defaultdict(list)
        for name, tensor in reader.manifest.tensors.items():
            for state, ranges in tensor.states.items():
                for stored in ranges:
                    placed[stored.file].append((f"{name} ({state})", stored))
        with progress(f"verify {folder.name}", reader.manifest.nbytes, "bytes") as report:
            # Each file is opened once and read front to back.
            for file, entry in reader.manifest.files.items():
                report(entry.header)
                problems += _problems_of(reader, file, sorted(placed[file], key=lambda one: one[1].offset), report)
    return problems


def _problems_of(
    reader: CheckpointReader, file: str, placed: list[tuple[str, StoredRange]], report: Report
) -> list[str]:
    """Return the problems of one file. placed: the names and places of its ranges, in order."""
    left = sum(stored.nbytes for _, stored in placed)
    problems = []
    try:
        reader.file(file)
        for name, stored in placed:
            for index in range(len(stored.xxh3)):
                size = min(reader.manifest.block, stored.nbytes - index * reader.manifest.block)
                left -= size
                report(size)
                try:
                    reader.block(name, stored, index)
                except DamagedError as error:
                    problems.append(str(error))
    except DamagedError as error:
        problems.append(str(error))
    except OSError as error:
        # Each further read of a failing disk would take as long. The other files are still read.
        problems.append(f"{file} cannot be read to its end: {error.strerror}")
    report(left)
    return problems
