"""The house rules: sizes, who imports whom, what stays light, and what is never used."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("trainer", "kernels", "data")
SOURCES = sorted(path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))
EVERYTHING = SOURCES + sorted(path for folder in ("tools", "tests") for path in (ROOT / folder).rglob("*.py"))
FILE_LINES, FUNCTION_LINES = 400, 60

# Rooms of llmtrain from the lowest: each may import its own floor and those below. Modules directly in llmtrain
# compose the rooms, and lie between them and the command line.
FLOORS = (
    {"errors"},
    {"cluster", "recipe"},
    {"model", "optim"},
    {"parallel", "sharding", "offload", "checkpoint", "telemetry"},
    {"plan", "train"},
    {"cli", "__main__"},
)
COMPOSING = next(floor for floor, rooms in enumerate(FLOORS) if "train" in rooms)

# Pure data that a recipe is made of and checked against; they import nothing above themselves.
SHARED_DATA = {"config", "presets", "tensors", "actions", "pieces", "schedules", "split", "check"}

CLI = sorted(path.stem for path in (ROOT / "trainer/llmtrain/cli").glob("[!_]*.py"))
WITHOUT_TORCH = (
    *(f"llmtrain.cli.{verb}" for verb in CLI),
    "llmtrain.plan.prepare",
    "llmtrain.recipe.document",
    "llmtrain.model.presets",
    "llmtrain.model.tensors",
    "llmtrain.cluster.layout",
    "llmtrain.plan.tensor_check",
    "llmtrain.cluster.nic",
    "llmtrain.plan.cluster_view",
    "llmtrain.plan.cluster_source",
    "llmtrain.launch.measure.discover",
    "llmtrain.launch.measure.links",
    "llmtrain.launch.measure.result",
    "llmtrain.plan.pipeline.view",
    "llmtrain.launch.doctor",
    "llmtrain.launch.run_lock",
    "llmtrain.launch.status",
    "llmtrain.telemetry.report",
    "llmtrain.launch.submit",
    "llmtrain_data.config",
)


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", EVERYTHING, ids=name)
def test_sizes(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= FILE_LINES
    long = [
        node.name
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES
    ]
    assert long == []


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside functions, but for types alone."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            skipped.update(child for statement in node.body for child in ast.walk(statement))
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            # `from a import b` may import the module a.b.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor_of(module: list[str]) -> int:
    room = module[1] if len(module) > 1 else "errors"
    return next((floor for floor, rooms in enumerate(FLOORS) if room in rooms), COMPOSING)


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_imports_point_down(path: Path) -> None:
    importer = list(path.relative_to(ROOT).with_suffix("").parts[1:])
    for imported in (module.split(".") for module in imported_modules(path)):
        if importer[0] == "llmtrain_kernels":
            assert imported[0] not in ("llmtrain", "llmtrain_data")
        elif importer[0] == "llmtrain_data":
            assert imported[0] not in ("llmtrain", "llmtrain_kernels")
        elif imported[0] == "llmtrain" and not SHARED_DATA & set(imported[2:]):
            assert floor_of(imported) <= floor_of(importer), f"{'.'.join(importer)} imports {'.'.join(imported)}"


def test_packages_are_only_folders() -> None:
    """Importing a package imports nothing else, and no name can be imported from two places."""
    inits = [path for path in SOURCES if path.name == "__init__.py"]
    assert inits
    for path in inits:
        assert not [*imported_modules(path)], name(path)
    assert [path for folder in PACKAGES for path in (ROOT / folder).glob("*.py")] == []


@pytest.mark.parametrize("path", EVERYTHING, ids=name)
def test_nothing_runs_what_it_loads(path: Path) -> None:
    """pickle, torch.load and yaml.load can execute what a file says."""
    assert not {"pickle", "dill", "cloudpickle"} & {module.split(".")[0] for module in imported_modules(path)}
    calls = {ast.unparse(node.func) for node in ast.walk(tree(path)) if isinstance(node, ast.Call)}
    assert not {"torch.load", "yaml.load", "yaml.unsafe_load", "eval", "exec"} & calls


def in_a_new_process(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_pure_modules_do_not_import_torch() -> None:
    modules = ", ".join(WITHOUT_TORCH)
    assert in_a_new_process(f"import sys, {modules}; print('torch' in sys.modules)") == "False"


def test_help_imports_nothing_heavy() -> None:
    program = "import sys; from llmtrain.cli.main import main; main(['--help']); print('', *sys.modules)"
    loaded = set(in_a_new_process(program).split())
    assert "llmtrain.cli.main" in loaded
    assert not {"torch", "numpy", "transformers", "datasets", "pydantic", "omegaconf", "wandb"} & loaded


@pytest.mark.parametrize(
    "verb",
    [
        "run",
        "submit",
        "status",
        "logs",
        "eval",
        "generate",
        "report",
        "doctor",
        "recipes",
        "data",
        "cluster",
        "bench",
        "pipeline",
        "ckpt",
    ],
)
def test_verbs_parse_without_torch(verb: str) -> None:
    """A verb's module holds its parsing alone, so that its --help is as quick."""
    heavy = {module.split(".")[0] for module in top_level_imports(ROOT / f"trainer/llmtrain/cli/{verb}.py")}
    assert heavy <= {"typer", "llmtrain", "llmtrain_data", *sys.stdlib_module_names}


def top_level_imports(path: Path) -> Iterator[str]:
    for node in tree(path).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
