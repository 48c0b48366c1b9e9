"""Corpora: the inputs of data preparation, read as a stream of chunks in constant memory."""

import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llmtrain_data import units
from llmtrain_data.corpus_options import COMPRESSION, HF_FILES, RECORDS, CorpusOptions
from llmtrain_data.errors import DataError
from llmtrain_data.left_out import LeftOut
from llmtrain_data.untrusted import reason

if TYPE_CHECKING:
    from llmtrain_data.readers import Chunk

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders that `stdlib` skips: third-party packages, and tests, which are half of the library and repetitive."""

# Kinds of files in a folder that are read as others.
_NAMES = {"table": "tables as text"}
_TABLES = (
    "llmtrain reads the rows of a table that is not compressed, by its own path; give it so, convert it to JSON lines "
    "or Parquet, or take it as text with --input-format text"
)


@dataclass(frozen=True)
class FileCorpus:
    """Files, in reading order. unit: what `total` and `Chunk.done` count. left_out: skipped files; complete only after
    all chunks were read."""

    files: list[Path]
    options: CorpusOptions
    whole_files: bool
    description: str
    unit: Literal["bytes", "rows"] = "bytes"
    left_out: LeftOut = field(default_factory=LeftOut)

    @property
    def total(self) -> int | None:
        """Bytes of all files on disk."""
        return sum(path.stat().st_size for path in self.files)

    def chunks(self) -> "Iterator[Chunk]":
        """Read the documents. Raises DataError that names the file, and the line if there is one."""
        from llmtrain_data import readers

        yield from readers.read_files(self.files, self._kind, self.options, self.whole_files, self.left_out)

    def _kind(self, path: Path) -> str:
        from llmtrain_data import readers

        kind = _kind_by_name(path, self.options, alone=not self.whole_files)
        if kind == "json":
            return "jsonl" if readers.begins_with_record(path, self.options.text_key) else "text"
        return "text" if kind == "table" else kind


@dataclass(frozen=True)
class HuggingFaceCorpus:
    """A dataset that the `datasets` library opens: `NAME`, `NAME:CONFIG`, a saved dataset, a CSV or an Arrow file."""

    name: str
    options: CorpusOptions
    unit: Literal["bytes", "rows"] = "rows"
    left_out: LeftOut = field(default_factory=LeftOut)

    @property
    def description(self) -> str:
        """The dataset and the split, for messages."""
        return f"{self.options.split} split of the dataset {self.name}"

    @property
    def total(self) -> int | None:
        """Number of rows, None if the dataset does not say."""
        from llmtrain_data import hf

        return hf.rows(self.name, self.options.split)

    def chunks(self) -> "Iterator[Chunk]":
        """Read the documents. Raises DataError if the dataset or its text column does not exist."""
        from llmtrain_data import hf

        yield from hf.read(self.name, self.options.split, self.options.text_key)


Corpus = FileCorpus | HuggingFaceCorpus


def no_text(corpus: Corpus) -> DataError:
    """Return the error for a corpus without any text, after its chunks were read."""
    return DataError(f"the input has no text: {corpus.description}{corpus.left_out.clause()}")


def open_corpus(source: str, options: CorpusOptions) -> Corpus:
    """Return the corpus of `source`: `stdlib`, `hf:NAME`, a file or a folder.

    Raises DataError if it does not exist or is empty.
    """
    path = Path(source)
    if source.startswith("hf:"):
        return HuggingFaceCorpus(source.removeprefix("hf:"), options)
    if source == "stdlib" and not path.exists():
        return _standard_library(options)
    if not path.exists():
        raise DataError(f"input {source} not found; expected a file, a folder, hf:NAME or stdlib")
    saved = any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))
    if options.input_format == "hf" or saved or (path.is_file() and _is_hf_file(path, options)):
        return HuggingFaceCorpus(source, options)
    if not (path.is_file() or path.is_dir()):
        raise DataError(f"input {source} is not a regular file; expected a file, a folder, hf:NAME or stdlib")
    if path.is_file():
        corpus = FileCorpus([path], options, False, f"{path.name} ({_kind_by_name(path, options, alone=True)})")
    else:
        corpus = _folder(path, options)
    if corpus.total == 0:
        raise DataError(f"input {source} is empty")
    return corpus


def _standard_library(options: CorpusOptions) -> FileCorpus:
    """Return the Python source of the running interpreter's standard library, about 12 MB on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in _matching(root, options.glob) if path.suffix == ".py" and path.is_file()]
    files = [path for path in files if not NOT_LIBRARY & set(path.relative_to(root).parts)]
    if not files:
        raise DataError(f"input stdlib: no Python source in {root} matches --glob {options.glob!r}")
    return FileCorpus(
        _ordered(files, root, options), options, True, f"{units.count(len(files), 'file')} of Python's library"
    )


def _folder(root: Path, options: CorpusOptions) -> FileCorpus:
    files, left_out = [], LeftOut()
    for path in _matching(root, options.glob):
        if path.is_dir():
            continue
        if _is_hidden(path, root):
            left_out.add(path, "hidden")
        elif not path.is_file():
            left_out.add(path, "not regular")
        elif not path.stat().st_size:
            left_out.add(path, "empty")
        else:
            files.append(path)
    if not files:
        raise DataError(f"input {root}: no file in this folder matches --glob {options.glob!r}{left_out.clause()}")
    order = "in a fixed shuffled order" if options.shuffle else "by name"
    # With the files that are left out, of which the lines at the end tell: the counts add up.
    found = len(files) + left_out.count()
    kinds = Counter(sorted(_kind_by_name(path, options, alone=False) for path in files))
    if set(kinds) == {"table"}:
        raise DataError(f"input {root} has only tables. {_TABLES}")
    shares = ", ".join(f"{count} {_NAMES.get(kind, kind)}" for kind, count in kinds.most_common())
    description = f"{found} files {order} ({shares})" if len(files) > 1 else files[0].name
    return FileCorpus(_ordered(files, root, options), options, True, description, left_out=left_out)


def _matching(root: Path, glob: str) -> list[Path]:
    """Return the paths in a folder, at any depth, whose names match a pattern. Raises DataError for a bad pattern."""
    try:
        return list(dict.fromkeys(path for folder in _subfolders(root) for path in folder.glob(glob)))
    except (NotImplementedError, ValueError) as error:
        raise DataError(f"--glob is {glob!r} ({reason(error)}); expected a pattern of names, such as '*.py'") from error


def _subfolders(root: Path) -> Iterator[Path]:
    """Yield a folder and those in it, at any depth, each once: first those that no link leads to. Raises DataError for
    one that cannot be listed, unless it is hidden."""

    def fail(error: OSError) -> None:
        if not _is_hidden(Path(error.filename), root):
            raise DataError(f"{error.filename} cannot be read: {reason(error)}; allow it, or move it elsewhere")

    seen, left = set[str](), [root]
    while left:
        for parent, names, _ in os.walk(left.pop(0), onerror=fail):
            if (real := os.path.realpath(parent)) in seen:
                names.clear()
                continue
            seen.add(real)
            yield Path(parent)
            names.sort()
            left += [path for name in names if (path := Path(parent, name)).is_symlink()]


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _ordered(files: list[Path], root: Path, options: CorpusOptions) -> list[Path]:
    """Sort by a hash of the path inside the folder, or by the path itself.

    Splits are ranges of documents. Sorted by name, the last folders would become the validation split, often another
    domain than training. The order by hash needs no seed, is equal on every machine, and stays when files are added.
    """
    names = {path: path.relative_to(root).as_posix().encode("utf-8", "surrogateescape") for path in files}
    if options.shuffle:
        return sorted(files, key=lambda path: (hashlib.blake2b(names[path]).digest(), names[path]))
    return sorted(files, key=names.__getitem__)


def _kind_by_name(path: Path, options: CorpusOptions, alone: bool) -> str:
    """Return the reader for a file; `json` if its first line decides. A `.json` file holds records if it is the input
    itself, mostly text inside a folder, where a `table`, such as one among source files, is text. Raises DataError for
    a compressed table that is the input itself."""
    if options.input_format != "auto":
        return options.input_format
    suffix = (Path(path.stem) if path.suffix.lower() in COMPRESSION else path).suffix.lower()
    if suffix in HF_FILES:
        if alone:
            raise DataError(f"input {path} is a compressed table. {_TABLES}")
        return "table"
    if suffix == ".json":
        return "jsonl" if alone else "json"
    return RECORDS.get(suffix, "text")


def _is_hf_file(path: Path, options: CorpusOptions) -> bool:
    return options.input_format == "auto" and path.suffix.lower() in HF_FILES
