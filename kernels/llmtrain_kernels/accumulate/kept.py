"""Which gradients wait for others on a GPU. No torch in here: the planner counts their bytes too."""

KEPT_BELOW = 1 << 22
"""Elements of a gradient from which on a kernel of its own costs less than the memory that it would keep."""


def kept(numel: int) -> bool:
    """Return whether a gradient waits on a GPU, so that one kernel adds all of a unit that do."""
    return numel < KEPT_BELOW
