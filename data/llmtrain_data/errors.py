"""Errors of the data package; the command line prints them as one sentence and exits with 2."""


class DataError(Exception):
    """A corpus, tokenizer or prepared data set that cannot be used as it is. One sentence."""
