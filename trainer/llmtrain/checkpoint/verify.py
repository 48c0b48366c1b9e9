"""Verify every byte of a checkpoint."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from llmtrain_data.progress import Report, progress
from llmtrain_data.untrusted import reason

from llmtrain.checkpoint.deleted import DeletedError
from llmtrain.checkpoint.manifest import MANIFEST, SIDECAR, StoredRange
from llmtrain.checkpoint.plain_file import DamagedError
from llmtrain.checkpoint.read import CheckpointReader


@dataclass
class Verified:
    """The problems of a checkpoint, one sentence per file or block. damage: none if it is sound as far as it could be
    read. unread: of files that the file system does not give; they may be sound."""

    damage: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """All of them."""
        return self.damage + self.unread


def verify(folder: Path) -> Verified:
    """Verify the checkpoint in `folder`.

    Reads every byte, and also finds files that are missing, too long, too short or not part of the checkpoint. Raises
    DeletedError if the folder is not there at the end.
    """
    found = Verified()
    try:
        _verify(folder, found)
    except (DamagedError, FileNotFoundError) as error:
        found.damage.append(str(error))
    except OSError as error:
        found.unread.append(f"{Path(error.filename or MANIFEST).name} cannot be read: {reason(error)}")
    if found.problems and not folder.is_dir():
        raise DeletedError(folder)
    return found


def _verify(folder: Path, found: Verified) -> None:
    with CheckpointReader(folder) as reader:
        expected = {*reader.manifest.files, MANIFEST, SIDECAR}
        extra = sorted({path.name for path in folder.iterdir()} - expected)
        found.damage += [f"{name} is not part of the checkpoint" for name in extra]
        placed = defaultdict(list)
        for name, tensor in reader.manifest.tensors.items():
            for state, ranges in tensor.states.items():
                for stored in ranges:
                    placed[stored.file].append((f"{name} ({state})", stored))
        with progress(f"verify {folder.name}", reader.manifest.nbytes, "bytes") as report:
            # Each file is opened once and read front to back.
            for file, entry in reader.manifest.files.items():
                report(entry.header)
                in_order = sorted(placed[file], key=lambda one: one[1].offset)
                _verify_file(reader, file, in_order, found, report)


def _verify_file(
    reader: CheckpointReader, file: str, placed: list[tuple[str, StoredRange]], found: Verified, report: Report
) -> None:
    """Verify one file. placed: the names and ranges of its content, in order."""
    left = sum(stored.nbytes for _, stored in placed)
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
                    found.damage.append(str(error))
    except DamagedError as error:
        found.damage.append(str(error))
    except OSError as error:
        # Each further read of a failing disk would take as long. The other files are still read.
        found.unread.append(f"{file} cannot be read to its end: {reason(error)}")
    report(left)
