"""Datasets of the Hugging Face `datasets` library, streamed without a copy in its cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmtrain_data.corpus_options import HF_FILES
from llmtrain_data.errors import DataError
from llmtrain_data.readers import ColumnChunk, column_chunks, few
from llmtrain_data.untrusted import reason

ROWS = 1000
"""Rows per read."""


def rows(name: str, split: str) -> int | None:
    """Return the number of rows, None if the dataset does not say."""
    dataset = _open(name, split)
    if hasattr(dataset, "__len__"):
        return len(dataset)
    known = dataset.info.splits or {}
    return known[split].num_examples if split in known else None


def read(name: str, split: str, key: str) -> Iterator[ColumnChunk]:
    """Read the text column `key` of a dataset."""
    dataset = _open(name, split, key)
    if dataset.column_names is not None:
        _expect_column(name, key, dataset.column_names)
        dataset = dataset.select_columns([key])
    for table in _tables(dataset, name, split):
        # The columns of files without a schema, such as CSV, are known only now.
        _expect_column(name, key, table.column_names)
        for column in table.column(key).chunks:
            yield from column_chunks(column, f"dataset {name}: column {key!r}", 1)


def _expect_column(name: str, key: str, columns: list[str]) -> None:
    if key not in columns:
        raise DataError(f"dataset {name} has no column {key!r}, only {few(columns)}; choose one with --text-key")


def _tables(dataset: Any, name: str, split: str) -> Iterator[Any]:
    tables = iter(dataset.with_format("arrow").iter(batch_size=ROWS))
    while True:
        with _data_errors(name, split, "read"):
            table = next(tables, None)
        if table is None:
            return
        yield table


def _open(name: str, split: str, key: str | None = None) -> Any:
    """Open a dataset. key: the column of texts, which is none of numbers in a CSV file, whatever a part of it holds."""
    import datasets

    datasets.disable_progress_bars()
    path = Path(name)
    with _data_errors(name, split, "opened"):
        if any((path / file).is_file() for file in ("dataset_info.json", "dataset_dict.json")):
            saved = datasets.load_from_disk(name)
            if isinstance(saved, datasets.DatasetDict):
                _expect_split(split, list(saved))
                return saved[split]
            _expect_split(split, sorted({"train", str(saved.split or "train")}))
            return saved
        suffix = path.suffix.lower()
        if path.is_file() and suffix in HF_FILES:
            _expect_split(split, ["train"])
            kind = HF_FILES[suffix]
            # Texts such as "NA" and "null" are texts.
            texts = {"keep_default_na": False, "converters": {key: str} if key else None}
            extra: dict[str, Any] = texts if kind == "csv" else {}
            extra |= {"sep": "\t"} if suffix == ".tsv" else {}
            return datasets.load_dataset(kind, data_files=name, split="train", streaming=True, **extra)
        base, _, config = (name, "", "") if path.exists() else name.partition(":")
        return datasets.load_dataset(base, config or None, split=split, streaming=True)


def _expect_split(split: str, splits: list[str]) -> None:
    if split not in splits:
        raise ValueError(f"it has no such split, only {few(splits)}; choose one with --dataset-split")


@contextmanager
def _data_errors(name: str, split: str, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # datasets passes on errors of every library that it uses
        raise DataError(f"dataset {name} (split {split}) cannot be {what}: {reason(error)}") from error
