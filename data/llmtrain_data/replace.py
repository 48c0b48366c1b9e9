"""Replaces small files whole: readers, and what follows a full disk or a power failure, find the old or the new one."""

import os
from contextlib import suppress
from pathlib import Path

from llmtrain_data.untrusted import UnreadableError, read_bytes


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to `path.partial`, and rename that to `path`; do nothing if `path` has this content.

    Raises OSError, and then leaves `path` as it was.
    """
    with suppress(UnreadableError):
        if read_bytes(path, len(content)) == content:
            return
    aside = path.with_name(path.name + ".partial")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise
