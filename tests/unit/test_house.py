"""The house rules: sizes, imports between rooms, modules without heavy imports, and forbidden calls."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("trainer", "kernels", "data")
SOURCES = sorted(path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))
EVERYTHING = SOURCES + sorted(path for folder in ("tools", "tests") for path in (ROOT / folder).rglob("*.py"))
FILE_LINES, FUNCTION_LINES, ARGUMENTS = 400, 60, 6

# Rooms of llmtrain: each may import those before it. A room is a folder, or a module directly in llmtrain.
ROOMS = (
    "errors",
    "yaml",
    "cluster",
    "model",
    "optim",
    "recipe",
    "plan",
    "comm",
    "sharding",
    "offload",
    "parallel",
    "checkpoint",
    "telemetry",
    "launch",
    "training",
    "inference",
    "start",
    "cli",
    "__main__",
)

# Rooms whose imports leave torch out: they read, describe and plan, and start what computes.
PURE_ROOMS = ("errors", "yaml", "cluster", "recipe", "plan", "start")

CLI = sorted(path.stem for path in (ROOT / "trainer/llmtrain/cli").glob("[!_]*.py"))
WITHOUT_TORCH = (
    *(f"llmtrain.cli.{command}" for command in CLI),
    "llmtrain.model.presets",
    "llmtrain.model.tensors",
    "llmtrain.model.hf_config",
    "llmtrain.checkpoint.describe",
    "llmtrain.comm.environment",
    "llmtrain.launch.measure.discover",
    "llmtrain.launch.measure.links",
    "llmtrain.launch.measure.memory_result",
    "llmtrain.launch.measure.result",
    "llmtrain.launch.doctor",
    "llmtrain.launch.run_lock",
    "llmtrain.launch.status",
    "llmtrain.launch.submit",
    "llmtrain.telemetry.report",
    "llmtrain_data.config",
)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_sizes() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in EVERYTHING}
    assert [name(path) for path, text in texts.items() if len(text.splitlines()) > FILE_LINES] == []
    long = [
        f"{name(path)}: {node.name}"
        for path in EVERYTHING
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES
    ]
    assert long == []


def test_constructors() -> None:
    """A constructor that is written out takes at most six arguments. A record (a dataclass or a NamedTuple) takes at
    most six fields by place, inherited ones and those with a default included. It may have more fields by keyword
    (`kw_only`), so that each call names them."""
    classes = [(path, node) for path in EVERYTHING for node in classes_of(path)]
    assert [f"{name(path)}: {node.name}" for path, node in classes if len(arguments(path, node)) > ARGUMENTS] == []


@cache
def classes_of(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]


def arguments(path: Path, node: ast.ClassDef) -> list[str]:
    """Return the arguments of a class's constructor: of `__init__`, all but self; of a record, fields that may be given
    by place."""
    inits = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    if inits:
        given = inits[0].args
        return [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)][1:]
    bases = [ast.unparse(base) for base in node.bases]
    decorators = [ast.unparse(one) for one in node.decorator_list if "dataclass" in ast.unparse(one)]
    if not decorators and "NamedTuple" not in bases:
        return []
    inherited = [name for base in bases if (home := record_of(path, base)) for name in arguments(*home)]
    return list(dict.fromkeys((*inherited, *by_place(node, any("kw_only=True" in one for one in decorators)))))


def record_of(path: Path, name: str) -> tuple[Path, ast.ClassDef] | None:
    """Return the class that a base class's name means in a file; None for one of another package."""
    found = [(place, node) for place in (path, *EVERYTHING) for node in classes_of(place) if node.name == name]
    return found[0] if found else None


def by_place(node: ast.ClassDef, by_keyword: bool) -> Iterator[str]:
    """Yield a record's own fields that may be given by place. by_keyword: whether none may be."""
    for one in node.body:
        if isinstance(one, ast.AnnAssign):
            kind = ast.unparse(one.annotation)
            by_keyword = by_keyword or kind.endswith("KW_ONLY")
            if not by_keyword and "ClassVar" not in kind:
                yield ast.unparse(one.target)


def test_records_are_counted(tmp_path: Path) -> None:
    """Fields with a default, of a NamedTuple and of a base class count; fields by keyword do not."""
    (tmp_path / "records.py").write_text(RECORDS)
    counted = {node.name: arguments(tmp_path / "records.py", node) for node in classes_of(tmp_path / "records.py")}
    assert counted == {"Plain": ["a", "b"], "Pair": ["a", "b"], "Longer": ["a", "b", "c"], "Named": [], "Rest": ["a"]}


RECORDS = """
@dataclass(frozen=True)
class Plain:
    a: int
    b: int = 0
    kind: ClassVar[int] = 0

class Pair(NamedTuple):
    a: int
    b: int

@dataclass
class Longer(Plain):
    c: int = 0

@dataclass(frozen=True, kw_only=True)
class Named:
    a: int

@dataclass
class Rest:
    a: int
    _: KW_ONLY
    b: int
"""


def imported_modules(path: Path) -> Iterator[str]:
    """Yield every module that a file imports: at its top, inside functions, or for types alone."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            # `from a import b` may import the module a.b.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts[1:])


MODULES = {module_name(path): path for path in SOURCES if path.name != "__init__.py"}


def neighbours(module: str) -> set[str]:
    """The project's modules that a module imports."""
    found = list(imported_modules(MODULES[module]))
    return MODULES.keys() & {*found, *(name.rpartition(".")[0] for name in found)}


def test_every_module_is_in_a_room() -> None:
    rooms = {module.split(".")[1] for module in MODULES if module.startswith("llmtrain.")}
    assert rooms == set(ROOMS)


def test_imports_point_down() -> None:
    for module, imported in [(one, other) for one in MODULES for other in neighbours(one)]:
        package, room, *_ = module.split(".")
        if package != "llmtrain":
            assert imported.split(".")[0] == package, f"{module} imports {imported}"
        elif imported.startswith("llmtrain."):
            assert ROOMS.index(imported.split(".")[1]) <= ROOMS.index(room), f"{module} imports {imported}"


# Rooms that read recipes. All others take the plan, and never the recipe that it was made from.
WITH_RECIPE = ("recipe", "plan", "start", "cli")
WITHOUT_RECIPE = tuple(room for room in ROOMS if room not in WITH_RECIPE)


def test_what_runs_takes_the_plan() -> None:
    modules = [module for module in MODULES if module.split(".")[1] in WITHOUT_RECIPE]
    assert modules
    assert [one for one in modules if any(other.startswith("llmtrain.recipe.") for other in neighbours(one))] == []
    assert [one for one in modules if recipe_types(tree(MODULES[one]))] == []


def test_no_record_is_read() -> None:
    """A plan's record is a recipe, which files store: a decision is a field of the plan."""
    assert [(name(path), read) for path in SOURCES for read in records_read(tree(path))] == []


def recipe_types(module: ast.Module) -> list[str]:
    """Return where a module names the type `Recipe`."""
    names = [node for node in ast.walk(module) if isinstance(node, ast.Name | ast.Attribute)]
    return [ast.unparse(node) for node in names if "Recipe" in (getattr(node, "id", ""), getattr(node, "attr", ""))]


def records_read(module: ast.Module) -> list[str]:
    """Return where a module reads keys of a plan's record."""
    reads = [node for node in ast.walk(module) if isinstance(node, ast.Subscript | ast.Attribute)]
    return [ast.unparse(node) for node in reads if getattr(node.value, "attr", "") == "record"]


@pytest.mark.parametrize("line", ["def f(recipe: Recipe) -> None: ...", "def f(given: schema.Recipe | None): ..."])
def test_a_recipe_is_found(line: str) -> None:
    assert recipe_types(ast.parse(line)) != []


@pytest.mark.parametrize("line", ["plan.record['train']['steps']", "run.plan.record.get('train')"])
def test_a_read_record_is_found(line: str) -> None:
    assert records_read(ast.parse(line)) != []


def test_no_key_is_asserted() -> None:
    """A key that may be open is decided in the plan, or carried by a record that has it."""
    nodes = ((path, node) for path in SOURCES for node in ast.walk(tree(path)) if isinstance(node, ast.Assert))
    asserted = [(name(path), ast.unparse(node.test)) for path, node in nodes]
    assert [one for one in asserted if {"recipe", "cluster"} & set(re.findall(r"\w+", one[1]))] == []


# Rooms that query the kind of device; other rooms use `llmtrain.comm.device`.
ASK_FOR_DEVICES = ("llmtrain.comm.", "llmtrain.offload.", "llmtrain_kernels.")


def test_no_device_checks() -> None:
    ends = (".is_cuda", ".is_cpu", "device.type")
    for module in (module for module in MODULES if not module.startswith(ASK_FOR_DEVICES)):
        names = [ast.unparse(node) for node in ast.walk(tree(MODULES[module])) if isinstance(node, ast.Attribute)]
        names += imported_modules(MODULES[module])
        assert [one for one in names if one.endswith(ends) or one.startswith("torch.cuda")] == [], module


def test_no_module_imports_itself_through_others() -> None:
    # This raises CycleError, which names the modules.
    list(TopologicalSorter({module: neighbours(module) for module in MODULES}).static_order())


@pytest.mark.parametrize("room", ROOMS)
def test_folders_within_a_room_point_one_way(room: str) -> None:
    """What lies directly in a room counts as one of its folders."""
    folders = dict[str, set[str]]()
    for module in MODULES:
        if module.startswith(f"llmtrain.{room}."):
            own = folders.setdefault(folder_of(module), set())
            own |= {folder_of(other) for other in neighbours(module) if other.startswith(f"llmtrain.{room}.")}
    list(TopologicalSorter({folder: others - {folder} for folder, others in folders.items()}).static_order())


def folder_of(module: str) -> str:
    return module.rpartition(".")[0]


def test_public_types_have_names_of_their_own() -> None:
    """A name means one thing, in whichever module a reader meets it. Type variables have one letter."""
    bodies = [node for path in SOURCES for node in tree(path).body]
    names = [node.name for node in bodies if isinstance(node, ast.ClassDef)]
    names += [ast.unparse(node.targets[0]) for node in bodies if isinstance(node, ast.Assign)]
    assert [one for one, count in Counter(names).items() if count > 1 and one[0].isupper() and not one.isupper()] == []


def test_packages_are_only_folders() -> None:
    """Importing a package imports nothing else, and no name can be imported from two places."""
    inits = [path for path in SOURCES if path.name == "__init__.py"]
    assert inits
    for path in inits:
        assert not [*imported_modules(path)], name(path)
    assert [path for folder in PACKAGES for path in (ROOT / folder).glob("*.py")] == []


def test_nothing_runs_what_it_loads() -> None:
    """pickle, torch.load and yaml.load can execute what a file says."""
    for path in EVERYTHING:
        assert not {"pickle", "dill", "cloudpickle"} & packages_of(path), name(path)
        calls = {ast.unparse(node.func) for node in ast.walk(tree(path)) if isinstance(node, ast.Call)}
        assert not {"torch.load", "yaml.load", "yaml.unsafe_load", "eval", "exec"} & calls, name(path)


def test_tests_import_each_other_as_tests() -> None:
    """mypy finds them by no other name, and would check no call of what it does not find."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    others = {other.stem for other in tests}
    assert [name(path) for path in tests if others & packages_of(path)] == []


def packages_of(path: Path) -> set[str]:
    """Return the top-level packages that a file imports."""
    return {module.split(".")[0] for module in imported_modules(path)}


def in_a_new_process(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_pure_modules_do_not_import_torch() -> None:
    pure = [module for module in MODULES if module.startswith("llmtrain.") and module.split(".")[1] in PURE_ROOMS]
    modules = ", ".join((*pure, *WITHOUT_TORCH))
    assert in_a_new_process(f"import sys, {modules}; print('torch' in sys.modules)") == "False"


def test_help_imports_nothing_heavy() -> None:
    program = "import sys; from llmtrain.cli.main import main; main(['--help']); print('', *sys.modules)"
    loaded = set(in_a_new_process(program).split())
    assert "llmtrain.cli.main" in loaded
    assert not {"torch", "numpy", "transformers", "datasets", "pydantic", "omegaconf", "wandb"} & loaded


def test_a_run_imports_no_compiler() -> None:
    """torch's compiler takes longer to import than all other modules of a run."""
    program = "import sys, llmtrain.training.rank; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    assert in_a_new_process(program) == "True False"


def test_plan_does_not_import_torch() -> None:
    words = "['plan', 'llama-8b', 'cluster=p4d', 'zero.stage=0', '--ranks', '16']"
    program = f"import sys; from llmtrain.cli.main import main; print(main({words}), 'torch' in sys.modules)"
    assert in_a_new_process(program) == "2 False"


@pytest.mark.parametrize(
    "words",
    [
        ["run", "quickstart", "data.path=nowhere", "data.tokenizer=null"],
        ["run", "quickstart", "data.tokenizer=nowhere"],
        # A run that has begun does not need that folder.
        ["run", "quickstart", "model={hf: nowhere}", "name=not-begun"],
        ["generate", "nowhere", "--prompt", "hi"],
        ["eval", "nowhere"],
        ["ckpt", "list", "nowhere"],
        ["ckpt", "verify", "nowhere"],
    ],
)
def test_wrong_paths_are_found_before_torch_is_imported(words: list[str]) -> None:
    program = f"import sys; from llmtrain.cli.main import main; print(main({words}), 'torch' in sys.modules)"
    assert in_a_new_process(program) == "2 False"


@pytest.mark.parametrize(
    "command",
    [
        "run",
        "plan",
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
def test_commands_parse_without_torch(command: str) -> None:
    """A command's module only parses, so that its --help is fast too."""
    heavy = {module.split(".")[0] for module in top_level_imports(ROOT / f"trainer/llmtrain/cli/{command}.py")}
    assert heavy <= {"typer", "llmtrain", "llmtrain_data", *sys.stdlib_module_names}


def top_level_imports(path: Path) -> Iterator[str]:
    for node in tree(path).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
