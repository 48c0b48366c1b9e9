"""Hand a job to Slurm, and read the profile of a site. No torch in here."""

import os
from pathlib import Path

from llmtrain.errors import BadInputError, RunFailedError
from llmtrain.launch.run_lock import holder_of, taken_by
from llmtrain.launch.slurm import queue
from llmtrain.launch.slurm.config import Site
from llmtrain.launch.slurm.record import jobs_of, record_job, record_sources, slurm_folder
from llmtrain.launch.slurm.script import BatchJob, Chain, render
from llmtrain.yaml.strict_file import StrictFile

_FILE = StrictFile(Site, "a site")


def default_site() -> Path:
    """Return the path of the user's own profile, which need not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "llmtrain" / "site.yaml"


def load_site(path: Path | None) -> Site:
    """Return a site's profile from a file, or else the user's own, which need not exist. Raises BadInputError."""
    if path is None and not default_site().exists():
        return Site()
    path = path or default_site()
    return _FILE.parse(_FILE.read(path), f"{path}: ")


def submit(job: BatchJob, site: Site) -> list[str]:
    """Submit a job, or each job of its chain, and return the jobs' numbers.

    Writes the script, which contains the recipe, into the run's folder, and records the numbers there. Raises
    BadInputError if the run is already in the queue, RunFailedError if Slurm refuses.
    """
    for folder in job.folders:
        _refuse_second(folder)
    for folder in job.folders:
        slurm_folder(folder).mkdir(parents=True, exist_ok=True)
        script = slurm_folder(folder) / "job.sh"
        script.write_text(render(job, site), encoding="utf-8")
        record_sources(folder, job.recipe.sources)
    numbers: list[str] = []
    length = job.series.length if isinstance(job.series, Chain) else 1
    for _ in range(length):
        try:
            number = queue.submit(script, after=numbers)
        except RunFailedError as error:
            if not numbers:
                raise
            raise RunFailedError(
                f"{error}; of the chain of {length} jobs {', '.join(numbers)} are in the queue, take them out with "
                f"`scancel {' '.join(numbers)}` or let them run"
            ) from error
        numbers.append(number)
        if isinstance(job.series, Chain):
            record_job(job.folder, number)
        for folder, seed in zip(job.folders, job.seeds, strict=False):
            record_job(folder, f"{number}_{seed}")
    return numbers


def _refuse_second(folder: Path) -> None:
    active = [job for job in (queue.jobs(jobs_of(folder)) or {}).values() if job.active]
    if active:
        raise BadInputError(
            f"job {active[0].number} ({active[0].state}) is there for {folder} already; `scancel {active[0].number}` "
            "first, or give this run another name"
        )
    if (holder := holder_of(folder)) is not None:
        raise BadInputError(taken_by(folder, holder))
