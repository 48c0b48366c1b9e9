"""Options for reading an input, and the file formats by name suffix."""

from dataclasses import dataclass

from llmtrain_data.errors import DataError

INPUT_FORMATS = ("auto", "text", "jsonl", "parquet", "hf")
RECORDS = {".jsonl": "jsonl", ".jsonlines": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
HF_FILES = {".csv": "csv", ".tsv": "csv", ".arrow": "arrow"}
COMPRESSION = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class CorpusOptions:
    """Options for reading an input.

    input_format: auto decides by the file's name. text_key: field or column that holds the text. glob: name pattern
    for the files of a folder. separator: text between two documents in text files (None: see `readers.read_text`).
    split: split of a Hugging Face dataset. shuffle: read a folder's files in a fixed shuffled order instead of by name.
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
