"""A site's profile: the options for a cluster's Slurm that do not belong in a recipe."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar, Literal

from llmtrain_data.bounds import NodeRanks, RanksOrNone
from pydantic import Field

_SECRET = re.compile(
    r"(^|_)((API|ACCESS|PRIVATE|SECRET)?KEY|\w*TOKEN|\w*SECRET|PASS|PASSWD|\w*PASSWORD|PASSPHRASE|CREDENTIALS?)(_|$)"
)
_LOGIN_IN_ADDRESS = re.compile(r"://[^/@\s]*:[^/@\s]*@")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER = "[0-9]{1,9}"
_TIME = re.compile(
    rf"(?:(?P<days>{_NUMBER})-(?P<after>{_NUMBER}(?::{_NUMBER}){{0,2}})|(?P<plain>{_NUMBER}(?::{_NUMBER}){{0,2}}))"
)
# Those of sbatch and srun that give a job GPUs.
_GPU_OPTIONS = ("--gres=gpu", "--gpus", "-G", "--tres-per-")
Minutes = Annotated[int, Field(ge=0, le=10**9)]
Value = Annotated[int, Field(ge=-(10**18), le=10**18)]
# sbatch takes no more.
LARGEST_MARGIN = 65_535
Margin = Annotated[int, Field(ge=1, le=LARGEST_MARGIN, description="in seconds")]


@dataclass(frozen=True, kw_only=True)
class Container:
    """The ranks' container. image: for apptainer a file or address, for pyxis (`srun --container-image`) an address.
    mounts: folders to mount, as `/path` or `/path:/path/inside`.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    image: str
    runtime: Literal["apptainer", "pyxis"] = "apptainer"
    mounts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.image.strip():
            raise ValueError("image is empty; expected a container image")
        for text in (self.image, *self.mounts):
            _check_text("image or mounts", text)


@dataclass(frozen=True, kw_only=True)
class Site:
    """A site's profile. Slurm decides what the profile leaves out.

    account, partition, qos, constraint, reservation, gpus_per_node, time: as sbatch takes them. ranks_per_node: one for
    each accelerator; null: from the recipe's `cluster`, else gpus_per_node. cpus_per_rank: null for an even share of
    the job's cores on each node. exclusive: take entire nodes. margin: seconds before the end of the job's time at
    which Slurm signals the run to save and stop. modules: to load. python: the one with llmtrain; null: the one that
    submits, in a container `python`. container: for the ranks. environment: variables of the job; set secrets in the
    shell that submits, as the job inherits its variables. sbatch, srun: further options of these commands.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    time: str | Minutes | None = None
    ranks_per_node: NodeRanks | None = None
    cpus_per_rank: NodeRanks | None = None
    gpus_per_node: RanksOrNone | str | None = None
    exclusive: bool = False
    margin: Margin = 300
    modules: tuple[str, ...] = ()
    python: str | None = None
    container: Container | None = None
    environment: Mapping[str, str | Value] = field(default_factory=dict)
    sbatch: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key, text in self._texts():
            _check_text(key, text)
        if self.time is not None and seconds(str(self.time)) <= self.margin:
            raise ValueError(
                f"margin is {self.margin} seconds, but time is {self.time}, so Slurm would stop the run as it "
                "begins; lower margin or raise time"
            )
        for name, value in self.environment.items():
            _check_variable(name, str(value))
        for key, options in (("sbatch", self.sbatch), ("srun", self.srun)):
            for option in options:
                _check_option(key, option)

    @property
    def says_gpus(self) -> bool:
        """Whether the profile says how many GPUs a job gets: in `gpus_per_node`, or in options of sbatch or srun."""
        options = (*self.sbatch, *self.srun)
        return self.gpus_per_node is not None or any(option.startswith(_GPU_OPTIONS) for option in options)

    def _texts(self) -> Iterator[tuple[str, str]]:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, str):
                yield entry.name, value
            elif isinstance(value, tuple):
                yield from ((entry.name, text) for text in value)


def seconds(time: str) -> int:
    """Return the seconds of a Slurm time such as `90` (minutes), `24:00:00` or `7-0`. Raises ValueError."""
    found = _TIME.fullmatch(time)
    if found is None:
        raise ValueError(f"time is {time!r}; expected minutes, hours:minutes:seconds or days-hours, such as 24:00:00")
    if found["days"] is not None:
        parts = [int(part) for part in found["after"].split(":")]
        hours, minutes, rest = (*parts, 0, 0)[:3]
        return ((int(found["days"]) * 24 + hours) * 60 + minutes) * 60 + rest
    parts = [int(part) for part in found["plain"].split(":")]
    if len(parts) == 3:
        return (parts[0] * 60 + parts[1]) * 60 + parts[2]
    return parts[0] * 60 + (parts[1] if len(parts) == 2 else 0)


def _check_variable(name: str, value: str) -> None:
    if not _VARIABLE.fullmatch(name):
        raise ValueError(f"environment has {name!r}; expected the name of a variable")
    _check_text(f"environment.{name}", value)
    if _SECRET.search(name.upper()):
        raise _secret(f"environment.{name}")


def _check_option(key: str, option: str) -> None:
    if not option.startswith("-"):
        raise ValueError(f"{key} has {option!r}; expected one option each, such as --mail-type=END")
    if option.startswith("--export"):
        raise ValueError(f"{key} has --export; use environment, and the variables of the shell that submits")
    if option.startswith(("--chdir", "-D")):
        raise ValueError(f"{key} has {option}; submit from that folder, to which the recipe's paths are relative")


def _check_text(key: str, text: str) -> None:
    # A newline would start a new line of the script.
    if not text.isprintable():
        raise ValueError(f"{key} is {text!r}; expected printable characters")
    if _LOGIN_IN_ADDRESS.search(text):
        raise _secret(key)


def _secret(key: str) -> ValueError:
    return ValueError(
        f"{key} seems to hold a secret, which would be readable in the job's script; leave it out and set it in the "
        "shell that submits, whose variables the job inherits"
    )
