"""The demo's figures are right, and its proof can fail: the wrong gathers are seen to be wrong."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from gradmesh_demos import clip as job
from gradmesh_demos.clip import GATHERS, Learner, Towers, Views, dense_loss, rank_loss
from gradmesh_demos.runner import ALONE
from torch import Tensor

import gradmesh as gm
from gradmesh._util import environment
from gradmesh.cli import commands

CHANCE = 1 / job.HELD_OUT


@pytest.fixture(
    scope="module",
    params=[(2, "threads"), (3, "threads"), pytest.param((2, "gloo"), marks=pytest.mark.processes)],
)
def result(request: pytest.FixtureRequest) -> job.Result:
    ranks, backend = request.param
    return job.run(job.Job(ranks, backend, epochs=2))


def test_gradmesh_has_the_gradient_of_one_process(result: job.Result) -> None:
    assert result.grad_error["gradmesh"] <= 1e-10


@pytest.mark.parametrize("gather", ["no gradient", "slice only"])
def test_wrong_gathers_deviate_by_more_than_a_tenth_of_the_gradient(result: job.Result, gather: str) -> None:
    assert result.grad_error[gather] > result.largest_grad / 10


def test_training_on_ranks_is_training_in_one_process(result: job.Result) -> None:
    assert result.param_error <= 1e-10
    assert result.rank_error == 0
    assert result.curves["gradmesh"].loss == pytest.approx(result.curves[ALONE].loss, rel=1e-10)
    assert result.curves["gradmesh"].recall == result.curves[ALONE].recall


def test_wrong_gathers_learn_something_else(result: job.Result) -> None:
    losses = [curve.loss[-1] for name, curve in result.curves.items() if name != ALONE]
    assert len({round(loss, 3) for loss in losses}) == len(GATHERS)


def test_recall_on_held_out_images_rises_above_chance(result: job.Result) -> None:
    first, second = result.curves["gradmesh"].recall
    assert second > first > 5 * CHANCE
    assert result.curves["gradmesh"].loss[1] < result.curves["gradmesh"].loss[0]


def test_one_rank_needs_no_gradient_from_others() -> None:
    result = job.run(job.Job(ranks=1, backend="threads", epochs=1))
    assert result.grad_error["gradmesh"] <= 1e-10
    assert result.grad_error["slice only"] <= 1e-10  # the local slice is the full tensor
    assert result.grad_error["no gradient"] > result.largest_grad / 10


def test_the_seed_decides_everything_and_another_seed_something_else() -> None:
    one, same, other = (job.run(job.Job(2, "threads", epochs=1, seed=seed)) for seed in (1, 1, 2))
    assert one.curves == same.curves
    assert one.curves != other.curves


def test_training_and_held_out_images_are_two_halves_of_all_images_and_do_not_overlap() -> None:
    images = job.Images.load(seed=0)
    left, right = (torch.cat(views) for views in zip(images.training, images.held_out, strict=True))
    assert left.shape == right.shape == (1797, 32)
    assert [len(view) for view in images.held_out] == [job.HELD_OUT] * 2
    # No image is there twice, so none can be on both sides.
    assert len(torch.cat([left, right], dim=1).unique(dim=0)) == 1797


def _share(model: Towers, views: Views, batch: Tensor) -> float:
    return rank_loss("gradmesh", copy.deepcopy(model), views, batch).item()


@pytest.mark.parametrize("batch", [2, 7, 12])
def test_shares_of_the_ranks_add_up_to_the_dense_loss_for_any_batch(batch: int) -> None:
    views = (torch.randn(12, 32, dtype=torch.float64), torch.randn(12, 32, dtype=torch.float64))
    model, rows = Learner.new(0).model, torch.arange(batch)
    shares = gm.launch(_share, 3, backend="threads", args=(model, views, rows))
    expected = dense_loss(model, views, rows).item()
    assert sum(shares) == pytest.approx(expected, rel=1e-12)
    assert len(set(shares)) == 3


def test_recall_counts_halves_that_are_most_similar_to_their_other_half() -> None:
    model = Learner.new(0).model
    model.right = model.left
    view = torch.randn(10, 32, dtype=torch.float64)
    assert job.recall(model, (view, view)) == 1
    assert job.recall(model, (view, view.roll(1, dims=0))) == 0


def test_json_is_the_only_line_of_stdout_and_the_picture_is_a_png(tmp_path: Path) -> None:
    picture = tmp_path / "made" / "curves.png"
    options = ["--json", "--ranks", "2", "--backend", "threads", "--epochs", "1", "--picture", str(picture)]
    done = CliRunner().invoke(commands(), ["demo", *options])
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert (
        report["grad_error"] <= 1e-10 < min(report["grad_error_no_gradient"], report["grad_error_slice_only"])
    )
    assert CHANCE < report["recall"] < 1
    assert (report["ranks"], report["backend"], report["epochs"], report["seed"]) == (2, "threads", 1, 0)
    assert report["seconds"] > 0
    assert set(report["curves"]) == {*GATHERS, ALONE}
    assert all(len(curve["loss"]) == len(curve["recall"]) == 1 for curve in report["curves"].values())
    assert Path(report["picture"]) == picture.resolve()

    header = picture.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    assert width >= 1000
    assert height >= 500


def test_tables_show_each_epoch_and_judge_each_gather(tmp_path: Path) -> None:
    options = [
        "--ranks",
        "2",
        "--backend",
        "threads",
        "--epochs",
        "2",
        "--picture",
        str(tmp_path / "curves.png"),
    ]
    done = CliRunner().invoke(commands(), ["demo", *options])
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows if len(row) == 7 and row[-1].endswith("%")] == ["1", "2"]
    verdicts = {" ".join(row[:2]): row[-1] for row in rows if row[-1:] in (["rounding"], ["wrong"])}
    assert [key.split()[0] for key, verdict in verdicts.items() if verdict == "rounding"] == ["gradmesh"]
    assert [key for key, verdict in verdicts.items() if verdict == "wrong"] == ["no gradient", "slice only"]


def test_missing_extra_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environment.EXTRAS, "demo", ("click", "no_such_module"))
    with pytest.raises(gm.MissingExtraError) as caught:
        job.run(job.Job(1, "threads", 1))
    assert "not installed: no_such_module" in str(caught.value)
    assert "pip install 'gradmesh[demo]'" in str(caught.value)
