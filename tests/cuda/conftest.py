"""One process rehearses what the selected tests ask for."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.fake_cuda.library import build, compiler

FOLDER = Path(__file__).parent

Answer = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="session")
def answer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """Return what was found in a case or a twin."""
    if compiler() is None:
        pytest.skip("there is no C++ compiler to build the device that rehearses a GPU's steps")
    folder = tmp_path_factory.mktemp("cuda")
    asked: dict[str, list[str]] = {"cases": [], "twins": []}
    for item in request.session.items:
        for kind, names in asked.items():
            if item.path.parent == FOLDER and (call := getattr(item, "callspec", None)) and kind[:-1] in call.params:
                names.append(call.params[kind[:-1]])
    asked = {kind: list(dict.fromkeys(names)) for kind, names in asked.items()}
    library = build()
    paths = os.pathsep.join(filter(None, (str(FOLDER.parents[1]), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    subprocess.run(
        [sys.executable, str(FOLDER / "worker.py"), str(library), str(folder / "answer.json")],
        input=json.dumps(asked), text=True, check=True, timeout=550, env=environment, cwd=folder,
    )  # fmt: skip
    answers = json.loads((folder / "answer.json").read_text())

    def found(kind: str, name: str) -> dict[str, Any]:
        result: dict[str, Any] = answers[f"{kind} {name}"]
        assert "failed" not in result, result["failed"]
        return result

    return found
