"""Render the batch script of a run from its job and its site's profile.

At preemption and before the time limit, the script makes the run save, and then requeues the job with `scontrol
requeue`; in a chain, the next job resumes the run instead. It starts ranks that fail again, as often as the recipe
says. `tools/slurm/train_and_requeue.sh` has the lines that do this, for people's own batch scripts too.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import llmtrain
from llmtrain.errors import BadInputError
from llmtrain.launch.slurm.config import Container, Site
from llmtrain.yaml.shown import shown

INDEX = "$SLURM_ARRAY_TASK_ID"
# The largest array index that Slurm can allow, and a limit to the runs of one recipe.
LARGEST_SEED, MOST_SEEDS = 4_000_000, 10_000
_NUMBER, _STEP = "[0-9]{1,18}", "0*[1-9][0-9]{0,17}"
_RANGE = f"{_NUMBER}(?:-{_NUMBER})?(?::{_STEP})?"
_ARRAY = re.compile(f"{_RANGE}(?:,{_RANGE})*(?:%{_NUMBER})?")
_PART = re.compile(f"({_NUMBER})(?:-({_NUMBER}))?(?::({_STEP}))?")
# Ends the here-document; no line of a YAML recipe equals it.
_END = "END OF RECIPE"
# An array may have thousands of seeds, and each of its runs keeps the script.
_SHOWN = 3


@dataclass(frozen=True)
class Allocation:
    """The nodes that a job asks for."""

    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """The ranks on all nodes."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class SubmittedRecipe:
    """A recipe at its submission. text: in YAML, which the job's script contains. sources: the files that it was made
    of."""

    text: str
    sources: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Chain:
    """`length` jobs that train one run: each resumes it when the previous job stops. Slurm requeues a single job."""

    length: int = 1


@dataclass(frozen=True)
class Array:
    """A job whose tasks each train a run with another seed. seeds: as sbatch's --array takes them."""

    seeds: str


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A run as a Slurm job.

    name: of the run. folder: of the run, absolute. command: runs on every rank, followed by the recipe's file.
    restarts: `train.max_restarts`. remarks: sentences for the user.
    """

    name: str
    folder: Path
    allocation: Allocation
    command: tuple[str, ...]
    recipe: SubmittedRecipe
    series: Chain | Array = Chain()
    restarts: int = 0
    remarks: tuple[str, ...] = ()

    @property
    def seeds(self) -> list[int]:
        """The seeds of an array; none for a chain."""
        return array_indices(self.series.seeds) if isinstance(self.series, Array) else []

    @property
    def folders(self) -> list[Path]:
        """The folders of all runs of the job, in the order of their seeds."""
        if isinstance(self.series, Chain):
            return [self.folder]
        return [self.folder.with_name(seed_name(self.folder.name, str(seed))) for seed in self.seeds]

    @property
    def log(self) -> Path:
        """The file of the job's output, with Slurm's %j, or %A and %a, for the job's number."""
        if isinstance(self.series, Chain):
            return self.folder / "slurm" / "%j.log"
        return self.folder.with_name(seed_name(self.folder.name, "%a")) / "slurm" / "%A_%a.log"

    @property
    def recipe_file(self) -> str:
        """The file that the job writes its recipe to, quoted for the shell."""
        if isinstance(self.series, Chain):
            return f"{shlex.quote(str(self.folder))}/slurm/$SLURM_JOB_ID.yaml"
        folder = shlex.quote(seed_name(str(self.folder), ""))
        return f"{folder}{INDEX}/slurm/${{SLURM_ARRAY_JOB_ID}}_{INDEX}.yaml"


def seed_name(name: str, seed: str) -> str:
    """Return the name of the run of one seed of an array."""
    return f"{name}-seed{seed}"


def array_indices(array: str) -> list[int]:
    """Return the indices of an array such as `0-3`, `1,5,9` or `0-8:2%3`. Raises BadInputError."""
    given = f"--array is {shown(array)!r}; expected"
    if not _ARRAY.fullmatch(array):
        raise BadInputError(f"{given} seeds such as 0-3, or 1,5,9, or 0-9%2 for two at a time")
    ranges = [
        range(int(first), int(last or first) + 1, int(step or 1))
        for first, last, step in _PART.findall(array.partition("%")[0])
    ]
    if max(part.stop for part in ranges) > LARGEST_SEED + 1 or sum(map(len, ranges)) > MOST_SEEDS:
        raise BadInputError(f"{given} at most {MOST_SEEDS:,} seeds, of up to {LARGEST_SEED:,}")
    found = [seed for part in ranges for seed in part]
    if not found or len(set(found)) < len(found):
        raise BadInputError(f"{given} seeds that differ, such as 0-3, or 0-9%2 for two at a time")
    return found


def render(job: BatchJob, site: Site) -> str:
    """Return the batch script, complete for sbatch."""
    lines = ["#!/bin/bash" + (" -l" if site.modules else "")]
    lines += [f"#SBATCH {option}" for option in _options(job, site)]
    lines += [
        "",
        "# Written by `llmtrain submit`, which made the folder of the log too:",
        f"# mkdir -p {' '.join(shlex.quote(str(folder / 'slurm')) for folder in job.folders[:_SHOWN])}"
        + (" ..." if len(job.folders) > _SHOWN else ""),
        *(f"module load {shlex.quote(module)} || exit 1" for module in site.modules),
        "unset MASTER_ADDR MASTER_PORT",
        *(f"export {name}={shlex.quote(str(value))}" for name, value in site.environment.items()),
        # All are set here, as those above are unset: the shell that submits may have variables of these names.
        f"requeue={'no' if isinstance(job.series, Chain) and job.series.length > 1 else 'yes'}",
        f"margin={site.margin}",
        f"restarts={job.restarts}",
        "# The recipe as it was submitted; what is edited later does not change this job.",
        f"recipe={job.recipe_file}",
        f"cat > \"$recipe\" <<'{_END}' || exit 1",
        f"{job.recipe.text}{_END}",
        "checkpoints=${recipe%/slurm/*}/checkpoints",
        f"srun_options=({' '.join(map(shlex.quote, _srun_options(job, site)))})",
        f"set -- {' '.join(_command(job, site))}",
        "",
    ]
    return "\n".join(lines) + train_script()


def train_script() -> str:
    """Return the lines of train_and_requeue.sh that run a command as ranks and requeue the job, without the header for
    people's own scripts."""
    package = Path(llmtrain.__file__).resolve().parent
    shipped = package / "launch" / "slurm" / "train_and_requeue.sh"
    path = shipped if shipped.is_file() else package.parents[1] / "tools" / "slurm" / "train_and_requeue.sh"
    return path.read_text(encoding="utf-8").partition("\n\n")[2]


def _options(job: BatchJob, site: Site) -> Iterator[str]:
    values = {
        "job-name": job.name,
        "nodes": job.allocation.nodes,
        "ntasks-per-node": job.allocation.ranks_per_node,
        "cpus-per-task": site.cpus_per_rank,
        "gpus-per-node": site.gpus_per_node,
        "time": site.time,
        "account": site.account,
        "partition": site.partition,
        "qos": site.qos,
        "constraint": site.constraint,
        "reservation": site.reservation,
        "array": job.series.seeds if isinstance(job.series, Array) else None,
        "output": job.log,
        # Signal only the batch script, which passes the signal on to the ranks.
        "signal": f"B:USR1@{site.margin}",
        "open-mode": "append",
    }
    yield from (f"--{name}={shlex.quote(str(value))}" for name, value in values.items() if value is not None)
    yield "--requeue"
    if site.exclusive:
        yield "--exclusive"
    yield from map(shlex.quote, site.sbatch)


def _srun_options(job: BatchJob, site: Site) -> list[str]:
    options = list(site.srun)
    if site.container is not None and site.container.runtime == "pyxis":
        mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in _mounts(job, site.container)]
        # A container would start in its image's folder, and be gone with all that a run writes there.
        options += [f"--container-image={site.container.image}", f"--container-workdir={Path.cwd()}"]
        options.append(f"--container-mounts={','.join(mounts)}")
    return options


def _mounts(job: BatchJob, container: Container) -> list[str]:
    """Return the container's mounts, with the folder that relative paths begin at and that of the runs, where no other
    mount has them at the same place."""
    same = [Path(mount) for mount in container.mounts if ":" not in mount]
    added = list[Path]()
    for folder in (Path.cwd(), job.folder.parent):
        if not any(folder.is_relative_to(other) for other in (*same, *added)):
            added.append(folder)
    return [*container.mounts, *map(str, added)]


def _command(job: BatchJob, site: Site) -> Iterator[str]:
    if site.container is not None and site.container.runtime == "apptainer":
        # --nv mounts the GPU's libraries, and only warns if there are none.
        yield "apptainer exec --nv"
        yield from (f"--bind {shlex.quote(mount)}" for mount in _mounts(job, site.container))
        yield f"--pwd {shlex.quote(str(Path.cwd()))}"
        yield shlex.quote(site.container.image)
    yield from map(shlex.quote, job.command)
    yield '"$recipe"'
    if isinstance(job.series, Array):
        name = shlex.quote(seed_name(f"name={job.name}", ""))
        yield f'{name}"{INDEX}" seed="{INDEX}"'
