"""Where new weight shards lie after an optimizer step, until they are stored on the host or in files. No torch in
here."""

from collections.abc import Mapping

from llmtrain.plan.program.buffer_pool import paired_offsets, paired_size
from llmtrain.plan.program.spec import ProgramSpec


def stored_offsets(spec: ProgramSpec, elements: int) -> Mapping[str, int]:
    """Return the first element, in the buffer pool of gathered weights, of what lies there of each unit's new shard.

    Nothing is gathered then. A unit's shard does not overlap that of the unit before it, which is being stored, if the
    buffer pool has room for both. elements: size of the buffer pool.
    """
    sizes = {unit: size for unit, size in spec.stored.items() if size}
    offsets = [0] * len(sizes)
    if paired_size(list(sizes.values())) <= elements:
        offsets = paired_offsets(list(sizes.values()))
    return dict(zip(sizes, offsets, strict=True))
