"""How many rows of logits a chunk has. No torch in here: the planner counts chunks too."""

# With fewer rows, reading the weight takes longer than the arithmetic.
MIN_ROWS = 256
# Elements of one chunk's logits, for each device type.
CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27}


def chunk_rows(device: str, vocab: int) -> int:
    """Return how many rows of logits over `vocab` ids one chunk has on a device type."""
    return max(MIN_ROWS, CHUNK_ELEMENTS.get(device, 1 << 24) // vocab)


def row_stride(device: str, vocab: int) -> int:
    """Return how many logits a row of a chunk has on a device type, the ones of padding included.

    On GPUs, multiples of 64: cuBLAS takes products and Triton takes accesses of whole vectors only where sizes are
    multiples of 8, and few vocabularies are (GPT-2's 50257 is odd: its products ran at a fifth of the rate).
    """
    return -(-vocab // 64) * 64 if device == "cuda" else vocab
