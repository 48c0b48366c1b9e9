"""A quantized format, as far as sizes go. No torch in here."""

from dataclasses import dataclass

from llmtrain_kernels.quantize.packed_size import packed_bytes


@dataclass(frozen=True)
class PackedFormat:
    """A quantized format. Payload and scales of a shard are in one buffer (ZeRO++, section 3). block: elements that
    share a scale."""

    bits: int
    block: int

    def row_bytes(self, numel: int) -> int:
        """Bytes of `numel` packed elements."""
        return packed_bytes(numel, self.bits, self.block)
