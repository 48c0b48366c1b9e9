"""How an input is read, and which files are of which kind."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmtrain_data.errors import DataError

if TYPE_CHECKING:
    pass


INPUT_FORMATS = ("auto", "text", "jsonl", "parquet", "hf")


RECORDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


HF_FILES = {".csv": "csv", ".tsv": "csv", ".arrow": "arrow"}


COMPRESSION = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class CorpusOptions:
    """How to read an input.

    input_format: auto goes by the file's name. text_key: field or column that holds the text. glob: which
    files of a folder, by name. separator: ends a document in text files (none: see `readers.read_text`).
    split: part of a Hugging Face dataset. shuffle: whether a folder's files come in a fixed shuffled order
    instead of by name.
    """

    input_format: str = "auto"
    text_key: str = "text"
    glob: str = "*"
    separator: str | None = None
    split: str = "train"
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.input_format not in INPUT_FORMATS:
            raise DataError(f"--input-format is {self.input_format!r}; expected one of {', '.join(INPUT_FORMATS)}")
        if self.separator == "":
            raise DataError("--separator is empty; expected the text between two documents, such as '\\n\\n'")
