"""The checksums of a checkpoint: XXH3-64 digests.

The manifest has the digests of each file's header and of each block of every stored range; `manifest.json.xxh3` has the
digest of the manifest. `shard_file` computes them while it writes a file, and `read` verifies each block when it reads
it.
"""

from typing import Annotated

import xxhash
from pydantic import Field

from llmtrain.checkpoint.plain_file import DamagedError

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


def digest(data: bytes | bytearray | memoryview) -> str:
    """Return the XXH3-64 digest of `data` in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def verify_digest(data: bytes | bytearray | memoryview, expected: str, file: str, where: str) -> None:
    """Raise DamagedError if the digest of `data` is not `expected`. file, where: name the data in the message."""
    if digest(data) != expected:
        raise DamagedError(f"{file} does not match its checksum {where}")


def sidecar(name: str, content: bytes | bytearray) -> bytes:
    """Return the text of the file beside `name` that has the digest of its content, in the format of `xxhsum -H3`."""
    return f"XXH3_{digest(content)}  {name}\n".encode()
