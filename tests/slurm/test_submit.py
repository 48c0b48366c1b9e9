"""`llmtrain submit` on a real Slurm: jobs train, stop in every way, resume, and the curve stays the same."""

import json
import re
import sys
from collections.abc import Callable

import psutil
import pytest

from tests.slurm.desk import SECRET, Desk
from tests.tiny import Curve

pytestmark = pytest.mark.slurm

TRAIN = ("-m", "llmtrain", "run")
STEPS, LONG = 60, 1000


def trained(desk: Desk, steps: int) -> Curve:
    """Return the curve of an uninterrupted run of that many steps; trains it once."""
    name = f"calm-{steps}"
    if not desk.run(name).exists():
        desk.write(name, steps)
        (number,) = desk.submit(name)
        desk.wait_for_state(number, "COMPLETED", seconds=300)
    return desk.curve(name)


def check(desk: Desk, name: str, numbers: list[str], steps: int) -> list[int]:
    """Check that a run's curve is the uninterrupted one; return the steps after which its jobs resumed."""
    curve = desk.curve(name)
    assert curve == trained(desk, steps)
    text = "".join(desk.log(name, number) for number in numbers)
    return [int(step) for step in re.findall(r"continues after +step (\d+)", text)]


def test_a_recipe_of_three_dimensions_trains(desk: Desk) -> None:
    curve = trained(desk, STEPS)
    assert curve["eval", STEPS] < curve["eval", 0] - 1
    name = f"calm-{STEPS}"
    shown = json.loads(desk.llmtrain("status", str(desk.run(name)), "--json").stdout)
    assert [(run["state"], run["step"], run["steps"]) for run in shown] == [("finished", STEPS, STEPS)]
    log = desk.llmtrain("logs", str(desk.run(name))).stdout
    (number,) = [path.stem for path in (desk.run(name) / "slurm").glob("*.log")]
    assert f"job {number} on n[1-2] begins" in log
    assert "4 ranks, started by srun" in log
    assert "Traceback" not in log
    written = [path for path in desk.run(name).rglob("*") if path.is_file()]
    assert {"job.sh", f"{number}.log", "metrics.jsonl", "recipe.resolved.yaml", "manifest.json"} <= {
        path.name for path in written
    }
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []


def test_a_job_that_is_requeued_goes_on(desk: Desk) -> None:
    """The job trains the submitted recipe, although the file was edited before the job began."""
    desk.write("requeued", STEPS, "ranks_per_node: 2\nsbatch: [--hold]\n")
    (number,) = desk.submit("requeued")
    desk.write("requeued", LONG)
    shown = json.loads(desk.llmtrain("status", str(desk.run("requeued")), "--json").stdout)
    assert (shown[0]["state"], shown[0]["detail"]) == ("pending", "JobHeldUser; requeued.yaml changed since submission")
    desk.succeed("scontrol", "release", number)
    desk.wait_for_step("requeued", 10)
    desk.succeed("scontrol", "requeue", number)
    second = desk.llmtrain("submit", "requeued.yaml", "--site", "site.yaml")
    assert second.returncode == 2
    assert re.search(rf"job {number} \([A-Z]+\) is there for", second.stderr)
    desk.wait_for_state(number, "COMPLETED")
    (went_on,) = check(desk, "requeued", [number], STEPS)
    assert 10 <= went_on < STEPS


def ask(desk: Desk, number: str) -> None:
    desk.succeed("scancel", "--signal=USR1", number)


def ask_all(desk: Desk, number: str) -> None:
    desk.succeed("scancel", "--signal=USR1", "--full", number)


@pytest.mark.soak
@pytest.mark.parametrize("stop", [ask, ask_all])
def test_a_job_that_is_asked_to_stop_is_requeued(desk: Desk, stop: Callable[[Desk, str], None]) -> None:
    desk.write(stop.__name__, STEPS)
    (number,) = desk.submit(stop.__name__)
    desk.wait_for_step(stop.__name__, 10)
    stop(desk, number)
    desk.wait_for_state(number, "COMPLETED")
    (went_on,) = check(desk, stop.__name__, [number], STEPS)
    assert 10 <= went_on < STEPS


@pytest.mark.soak
def test_a_job_that_loses_a_rank_starts_its_ranks_again(desk: Desk) -> None:
    desk.write("lost", STEPS)
    (number,) = desk.submit("lost", "train.max_restarts=1", "checkpoint.every=5")
    reached = 0
    for _ in range(2):
        # So many steps later, the ranks that were started again have saved a checkpoint.
        desk.wait_for_step("lost", reached + 8)
        ranks = [one for one in psutil.process_iter(["cmdline"]) if f"/{number}.yaml" in " ".join(one.info["cmdline"])]
        next(one for one in ranks if one.info["cmdline"][1:5] == ["-P", *TRAIN]).kill()
        reached = max(at for kind, at in desk.curve("lost") if kind == "step")
    desk.wait_for_state(number, "COMPLETED")
    assert len(check(desk, "lost", [number], STEPS)) == 2
    assert desk.log("lost", number).count("restart 1 of 1 from step-") == 2


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_a_job_at_its_time_limit_is_requeued(desk: Desk) -> None:
    """Slurm checks every half a minute, so it signals the run 45 to 75 seconds after its start."""
    desk.write("limited", LONG, "ranks_per_node: 2\ntime: 00:02:00\nmargin: 45\n")
    (number,) = desk.submit("limited")
    desk.wait_for_state(number, "COMPLETED", seconds=1500)
    assert check(desk, "limited", [number], LONG)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_chain_finishes_what_takes_three_jobs(desk: Desk) -> None:
    desk.write("chain", STEPS)
    numbers = desk.submit("chain", "--chain", "4")
    assert len(set(numbers)) == 4
    for number, step in zip(numbers[:2], (10, 35), strict=True):
        desk.wait_for_step("chain", step)
        ask(desk, number)
        desk.wait_for_state(number, "FAILED")
    desk.wait_for_state(numbers[2], "COMPLETED")
    # Nothing remains to do for the last job.
    desk.wait_for_state(numbers[3], "CANCELLED")
    first, second = check(desk, "chain", numbers[:3], STEPS)
    assert 10 <= first < second < STEPS


@pytest.mark.soak
def test_a_job_that_is_cancelled_stays_so(desk: Desk) -> None:
    desk.write("cancelled", 100_000)
    (number,) = desk.submit("cancelled")
    desk.wait_for_step("cancelled", 10)
    desk.succeed("scancel", number)
    desk.wait_for_state(number, "CANCELLED")
    shown = json.loads(desk.llmtrain("status", str(desk.run("cancelled")), "--json").stdout)
    assert shown[0]["state"] == "stopped"


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_an_array_trains_a_run_for_each_seed(desk: Desk) -> None:
    desk.write("array", STEPS)
    (number,) = desk.submit("array", "--array", "1-2%1", "parallel.tensor=1")
    desk.wait_for_state(f"{number}_1", "COMPLETED", seconds=300)
    # The last task to start has the array's own id, which requeues all of the array's tasks.
    desk.wait_for_step("array-seed2", 10)
    ask(desk, f"{number}_2")
    desk.wait_for_state(f"{number}_2", "COMPLETED", seconds=300)
    first, second = desk.curve("array-seed1"), desk.curve("array-seed2")
    assert first.keys() == second.keys()
    assert first["step", STEPS] != second["step", STEPS]
    begun = [desk.log(f"array-seed{seed}", f"{number}_{seed}").count(" begins at ") for seed in (1, 2)]
    assert begun == [1, 2]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_eight_ranks_in_all_three_dimensions(desk: Desk) -> None:
    desk.write("cube", 20, "ranks_per_node: 4\n")
    (number,) = desk.submit("cube", "parallel.data=2")
    desk.wait_for_state(number, "COMPLETED", seconds=600)
    expected = trained(desk, STEPS)
    curve = {key: loss for key, loss in desk.curve("cube").items() if key[0] == "step" and key[1] < 5}
    assert len(curve) == 4
    # The learning rate's schedule differs after its warmup.
    assert curve == pytest.approx({key: expected[key] for key in curve}, rel=1e-5)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("by", "command"),
    [
        ("llmtrain", (sys.executable, *TRAIN, "--nproc", "4")),
        (
            "torchrun",
            (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", *TRAIN),
        ),
        ("mpirun", ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "4", sys.executable, *TRAIN)),
    ],
)
def test_other_launchers_give_the_same_curve(desk: Desk, by: str, command: tuple[str, ...]) -> None:
    desk.write(by, STEPS)
    said = desk.succeed(*command, f"{by}.yaml")
    assert f"4 ranks, started by {by}" in said
    assert desk.curve(by) == trained(desk, STEPS)


@pytest.mark.soak
def test_two_jobs_on_one_folder(desk: Desk) -> None:
    """The second job names the holder of the folder, and does not touch it."""
    desk.write("shared", 100_000)
    (number,) = desk.submit("shared")
    desk.wait_for_step("shared", 5)
    script = desk.run("shared") / "slurm" / "job.sh"
    other = desk.succeed("sbatch", "--parsable", str(script)).strip()
    desk.wait_for_state(other, "FAILED")
    said = [line for line in desk.log("shared", other).splitlines() if line.startswith("llmtrain:")]
    assert len(said) == 1
    assert re.search(rf"shared is being trained in by job {number}, process \d+ of root on n1, since ", said[0])
    desk.succeed("scancel", number)
    desk.wait_for_state(number, "CANCELLED")
    desk.curve("shared")
