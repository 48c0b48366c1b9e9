"""`llmtrain pipeline show`: text that fits, consistent numbers, a picture."""

import json
from io import BytesIO, StringIO
from pathlib import Path

import pytest
from llmtrain.cli.main import main
from llmtrain.errors import BadInputError
from llmtrain.plan.pipeline.layer_split import StageCosts, split_layers
from llmtrain.plan.pipeline.timeline import Durations
from llmtrain.plan.views.pipeline_drawing import COLORS, print_view, timeline_lines
from llmtrain.plan.views.pipeline_figure import timeline_figure
from llmtrain.plan.views.pipeline_view import PipelineView, durations_by_work, show
from llmtrain.recipe.pipeline import ScheduleName
from llmtrain_data.output import Terminal
from matplotlib.colors import to_hex
from matplotlib.image import imread

ALL: list[tuple[ScheduleName, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 3),
    ("breadth-first", 3),
    ("zero-bubble", 1),
    ("zero-bubble-v", 2),
    ("message-driven", 1),
]


def even_view(name: ScheduleName, chunks: int, ranks: int = 3, microbatches: int = 5) -> PipelineView:
    stages = ranks * chunks
    return show(ranks, chunks, microbatches, name, [1] * stages, Durations.even(stages))


@pytest.mark.parametrize(("name", "chunks"), ALL)
def test_every_action_is_in_its_ranks_line(name: ScheduleName, chunks: int) -> None:
    view = even_view(name, chunks)
    lines = [line.plain for line in timeline_lines(view, 10_000)]
    assert len(lines) == 3
    for rank, line in enumerate(lines):
        words = line.removeprefix(f"rank {rank}").replace("─", " ").split()
        assert words == [str(action) for action in view.schedule.actions[rank]]


def test_time_goes_on_below() -> None:
    view = even_view("1f1b", 1)
    (whole, *_), narrow = timeline_lines(view, 10_000), [line.plain for line in timeline_lines(view, 30)]
    assert max(map(len, narrow)) <= 30
    parts = [line.removeprefix("rank 0 ") for line in narrow if line.startswith("rank 0")]
    assert "".join(parts) == whole.plain.removeprefix("rank 0 ")
    assert len(parts) > 2


def test_the_middle_of_a_long_one_is_left_out() -> None:
    lines = [line.plain for line in timeline_lines(even_view("1f1b", 1, microbatches=500), 100)]
    assert sum("..." in line for line in lines) == 1
    assert len(lines) < 40
    assert "F0" in lines[0]
    assert "B499" in lines[-4]


def test_long_waits_cost_nothing() -> None:
    """The view draws only what it shows, however long the waits between."""
    late = Durations.even(3, transfer=1e12)
    lines = [line.plain for line in timeline_lines(show(3, 1, 5, "1f1b", [1, 1, 1], late), 100)]
    assert lines[0].startswith("rank 0 F0")
    assert lines[-4].rstrip().endswith("B4────")
    assert len(lines) < 40


def test_what_is_said() -> None:
    file = StringIO()
    print_view(even_view("1f1b", 1, 4, 3), Terminal(file=file, width=200))
    said = file.getvalue()
    assert "bubble       50.0% of the ranks' time, or 100.0% of their work" in said
    assert "activations  3 3 2 1 by rank" in said
    assert "step         18 forward passes of one layer, 2.000 times" in said
    assert "warning      parallel.pipeline is 4" in said


def test_durations_by_work_and_speed() -> None:
    """A rank that is twice as fast and has a head of two layers takes equally long with one layer more."""
    costs, speeds = StageCosts(6e9, 0.0, 12e9), [1.0, 2.0]
    split = split_layers(7, 2, "auto", costs, speeds)
    assert split == (3, 4)
    view = show(2, 1, 4, "1f1b", split, durations_by_work(split, costs, speeds, even_view("1f1b", 1, 2).schedule))
    assert view.timeline.bubble == pytest.approx(1 / (4 + 1))
    assert view.timeline.makespan == pytest.approx(3 * 3 * (4 + 1))


@pytest.mark.parametrize(("name", "chunks"), ALL)
def test_picture(name: ScheduleName, chunks: int) -> None:
    pixels = imread(BytesIO(timeline_figure(even_view(name, chunks))))
    assert pixels.shape[1] > pixels.shape[0]
    wanted = {COLORS[action.kind][action.chunk % 2] for action in even_view(name, chunks).schedule.actions[0]}
    found = {to_hex(pixel).upper() for pixel in set(map(tuple, pixels.reshape(-1, pixels.shape[2])[::7].tolist()))}
    assert wanted <= found


def test_impossible() -> None:
    with pytest.raises(BadInputError, match=r"pipeline.chunks is 2"):
        even_view("1f1b", 2)


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    overrides = ["parallel.pipeline=4", "pipeline.split=[3,3,3,3]", "train.global_batch=8", "train.microbatch=1"]
    png = tmp_path / "a.png"
    assert main(["pipeline", "show", "gpt2-124m", "cluster=auto", *overrides, "--json", "--png", str(png)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["ranks"], shown["microbatches"], shown["peak_live"]) == (4, 8, [4, 3, 2, 1])
    assert [stage["layers"] for stage in shown["stages"]] == [3, 3, 3, 3]
    # The last rank has the head, which counts as 4.9 layers.
    assert shown["bubble"] > 3 / 11
    assert png.read_bytes().startswith(b"\x89PNG")
    assert main(["pipeline", "show", "gpt2-124m", "cluster=auto", *overrides, "--ranks", "8"]) == 0
    assert "4 ranks, 4 microbatches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([], "parallel.pipeline is 1"),
        (["parallel.pipeline=4", "pipeline.split=[3,3,3,4]"], "which sums to 13"),
        (["parallel.pipeline=2", "train.global_batch=9", "train.microbatch=2"], "train.microbatch is 2"),
        (["parallel.pipeline=2", "pipeline.chunks=2"], "pipeline.chunks is 2"),
        # The message names the schedule's rule, and not the number of stages that follows.
        (["parallel.pipeline=4", "pipeline.schedule=zero-bubble-v", "pipeline.chunks=9"], "expected 2 with pipeline"),
        (["parallel.pipeline=2", "parallel.tensor=5"], "parallel.tensor is 5"),
        (["parallel.pipeline=3", "parallel.data=2", "--ranks", "7"], "the run has 7 ranks"),
        (["parallel.pipeline=2", "pipeline.split=even"], "balanced, auto or a list of whole numbers"),
        (["parallel.pipeline=2", "--png", "."], "--png is .; name a file that ends in .png"),
        (["parallel.pipeline=2", "--png", "a.jpg"], "--png is a.jpg; name a file that ends in .png"),
        (["parallel.pipeline=2", "--png", "/none/a.png"], "which cannot be written (No such file"),
    ],
)
def test_verb_refuses(overrides: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "show", "gpt2-124m", "cluster=auto", *overrides]) == 2
    assert sentence in capsys.readouterr().err
