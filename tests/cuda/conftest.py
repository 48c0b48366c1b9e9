"""Some processes rehearse what the selected tests ask for."""

import json
import os
import subprocess
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tools.fake_cuda.library import build, compiler

FOLDER = Path(__file__).parent

KINDS = ("cases", "twins")
PROCESSES = min(4, os.cpu_count() or 1)

Answer = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="session")
def answer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """Return what was found in a case or a twin."""
    if compiler() is None:
        pytest.skip("there is no C++ compiler to build the device that rehearses a GPU's steps")
    folder = tmp_path_factory.mktemp("cuda")
    asked = list(dict.fromkeys(_asked(request.session.items)))
    library = build()
    paths = os.pathsep.join(filter(None, (str(FOLDER.parents[1]), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}

    def rehearsed(number: int) -> dict[str, Any]:
        """Let a process rehearse its share, and return what it found."""
        path, share = folder / f"{number}.json", asked[number::PROCESSES]
        names = {kind: [name for of, name in share if of == kind] for kind in KINDS}
        subprocess.run(
            [sys.executable, str(FOLDER / "worker.py"), str(library), str(path)],
            input=json.dumps(names), text=True, check=True, timeout=1400, env=environment,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    with ThreadPoolExecutor(PROCESSES) as threads:
        answers = dict(ChainMap(*threads.map(rehearsed, range(PROCESSES))))

    def found(kind: str, name: str) -> dict[str, Any]:
        result: dict[str, Any] = answers[f"{kind} {name}"]
        assert "failed" not in result, result["failed"]
        return result

    return found


def _asked(items: Iterable[pytest.Item]) -> Iterator[tuple[str, str]]:
    """Yield the kind and the name of what each test needs."""
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        for kind in KINDS:
            if item.path.parent == FOLDER and kind[:-1] in params:
                yield kind, str(params[kind[:-1]])
