"""Errors of the data package. The command line prints their messages."""


class DataError(Exception):
    """A corpus, tokenizer or prepared data set is unusable. The message is one sentence; exit code 2."""

    exit_code = 2


class PreparationStoppedError(Exception):
    """A signal stopped a preparation, which left no files. The message is one sentence; exit code 1."""
