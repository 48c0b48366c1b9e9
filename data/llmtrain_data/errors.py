"""Errors of the data package; the command line prints them as one sentence."""


class DataError(Exception):
    """A corpus, tokenizer or prepared data set that cannot be used as it is. One sentence."""

    exit_code = 2


class PreparationStoppedError(Exception):
    """A preparation that was told to stop and left nothing behind. One sentence; exit code 1."""
