"""The size of packed rows; `format.py` describes what is in them. No torch in here, so that planners may use it."""

# The largest code of each number of bits.
MAX_CODE = {8: 127, 4: 7}
WORD = 0xFFFFFFFF
LARGEST_GPU_BLOCK = 8192
"""The most elements of a block on a GPU: one program has all of it in its registers."""


def packed_bytes(numel: int, bits: int, block: int) -> int:
    """Return the bytes of one packed row of `numel` elements. Raises ValueError for invalid numbers."""
    if bits not in MAX_CODE:
        raise ValueError(f"bits is {bits}: expected 4 or 8")
    if block < 1 or (bits == 4 and block % 2):
        raise ValueError(f"block is {block}: expected a positive number, even for 4 bits")
    if numel % 32 or not 0 <= numel <= WORD:
        raise ValueError(f"numel is {numel}: expected a multiple of 32 below 2^32; pad it")
    return numel * bits // 8 + 4 * -(-numel // block)
