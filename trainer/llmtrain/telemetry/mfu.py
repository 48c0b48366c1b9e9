"""The share of a peak that a rate reaches."""


def share_of(rate: float, fastest: float, peak: float | None) -> float | None:
    """Return `rate / peak`; None if the peak is unknown or wrong.

    fastest: the best rate so far. If it exceeds the peak, the peak is wrong.
    """
    return rate / peak if peak and fastest <= peak else None
