"""Averages of undeclared intent: notes and warnings with the numbers, and no error."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmesh.checker.findings import Verdict
from gradmesh.checker.run import Target, check_script
from tests.scripts import WRONG

pytestmark = pytest.mark.processes

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))


def hook(state, bucket):
    {divide}
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


{register}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for _ in range(2):
    x = torch.randn({rows}, 4)
    optimizer.zero_grad()
    loss = {loss}
    loss.backward()
    optimizer.step()
"""
REGISTER = "model.register_comm_hook(None, hook)"
MEAN = "model(x).square().mean()"
UNEVEN = "6 + 4 * rank"
LABELS = "nn.functional.cross_entropy(model(x), (labels := torch.arange(6) % 4)"
BESIDE = "(dist.all_reduce(count := torch.tensor(24.0)), {mean} + model(x).abs().sum() / {count})[1]"


def checked(
    folder: Path, *, divide: str = "pass", register: str = "", rows: str = "6", loss: str = MEAN
) -> Verdict:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(divide=divide, register=register, rows=rows, loss=loss))
    return check_script(Target(str(script)), ranks=2, steps=2)


def notes(folder: Path, **changes: str) -> list[str]:
    verdict = checked(folder, **changes)
    assert verdict.ok
    assert not verdict.findings, verdict.findings[0].message
    return list(verdict.notes)


def test_a_communication_hook_that_sums_is_noted_with_its_line_and_its_factor(tmp_path: Path) -> None:
    [note] = notes(tmp_path, register=REGISTER)
    line = SCRIPT.splitlines().index("{register}") + 1
    assert f"train.py:{line} sums the gradients of 2 ranks" in note
    assert "2 times the mean" in note


@pytest.mark.parametrize(
    ("divide", "loss"),
    [("bucket.buffer().div_(world)", MEAN), ("pass", f"{MEAN} / world")],
    ids=["the bucket is divided", "the loss is divided"],
)
def test_a_communication_hook_that_comes_to_the_mean_is_not_noted(
    tmp_path: Path, divide: str, loss: str
) -> None:
    assert notes(tmp_path, register=REGISTER, divide=divide, loss=loss) == []


def test_gradients_of_some_parameters_that_are_halved_are_noted(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = SCRIPT.format(divide="pass", register="", rows="6", loss=MEAN)
    text = text.replace("    optimizer.step()", "    model.module.bias.grad /= 2\n    optimizer.step()")
    script.write_text(text)
    verdict = check_script(Target(str(script)), ranks=2, steps=2)
    assert not verdict.findings
    [note] = verdict.notes
    line = text.splitlines().index("    model.module.bias.grad /= 2") + 1
    assert "the gradients of bias, and not those of the others, are multiplied by 0.5" in note
    assert f"train.py:{line}" in note


def warned(folder: Path, **changes: str) -> str:
    """The text of the one warning."""
    verdict = checked(folder, **changes)
    assert verdict.ok
    texts = {finding.message for finding in verdict.findings if finding.rule.id == "GM111"}
    assert len(verdict.findings) == len(texts) == 1
    return texts.pop()


@pytest.mark.parametrize("loss", [MEAN, "nn.functional.mse_loss(model(x), x) / 5"])
def test_a_mean_of_means_over_uneven_batches_is_a_warning_with_its_counts(tmp_path: Path, loss: str) -> None:
    text = warned(tmp_path, rows=UNEVEN, loss=loss)
    assert "24 on rank 0, 40 on rank 1" in text
    assert "1/64 in the mean over all 64 entries" in text
    weights = (48, 80) if loss == MEAN else (240, 400)
    assert f"an entry counts 1/{weights[0]} or 1/{weights[1]}" in text


@pytest.mark.parametrize(
    ("rows", "loss"),
    [
        ("6", MEAN),
        (UNEVEN, f"{MEAN} * ((6 + 4 * rank) * world / 16)"),
        (UNEVEN, "model(x).square().sum() / 64 * world"),
        (UNEVEN, f"{MEAN} + model(x).abs().mean()"),
        ("6", "(dist.all_reduce(n := torch.tensor(24.0)), n.div_(world), model(x).square().sum() / n)[2]"),
    ],
)
def test_even_batches_and_weighted_means_and_sums_of_terms_get_no_warning(
    tmp_path: Path, rows: str, loss: str
) -> None:
    assert notes(tmp_path, rows=rows, loss=loss) == []


@pytest.mark.parametrize(
    ("numbers", "of", "expected"),
    [
        ("(3, 5)", "mean()", ("12 + 20 on rank 0, 12 + 20 on rank 1", "1/64 in the mean")),
        ("(4, 4)", "mean()", None),
        ("(3, 5)", "sum() / 32", None),
    ],
)
def test_micro_batches_of_different_sizes_that_count_alike_are_a_warning(
    tmp_path: Path, numbers: str, of: str, expected: tuple[str, ...] | None
) -> None:
    loop = f"for n in {numbers}:\n        (model(torch.randn(n, 4)).square().{of} / 2).backward()"
    script = SCRIPT.replace("loss = {loss}\n    loss.backward()", loop)
    path = tmp_path / "train.py"
    path.write_text(script.format(divide="pass", register="", rows="6"))
    verdict = check_script(Target(str(path)), ranks=2, steps=2)
    texts = [finding.message for finding in verdict.findings]
    assert verdict.ok
    assert all(text in texts[0] for text in expected) if expected else not texts


def test_a_loss_divided_by_a_constant_that_is_the_number_of_ranks_is_checked_on_more(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    loss = f"({MEAN} + model(x).abs().mean()) / 2"
    path.write_text(SCRIPT.format(divide="pass", register="", rows="6", loss=loss))
    verdict = check_script(Target(str(path)), ranks=2, steps=2)
    assert (verdict.findings, verdict.ranks, verdict.followed) == ((), 4, 2)
    [note] = verdict.notes
    assert note.startswith("checked on 4 ranks, since on 2 a constant that divides the loss counts them, at ")
    assert f"train.py:{SCRIPT.splitlines().index('    loss = {loss}') + 1}" in note


def test_a_division_that_more_ranks_cannot_show_is_a_note(tmp_path: Path) -> None:
    [note] = notes(tmp_path, loss=f"{MEAN} / world", rows="{2: 6}[world]")
    assert "could not be checked on 4 ranks" in note


@pytest.mark.parametrize(
    "loss",
    [
        f"{LABELS}.where(labels > rank, -100))",
        f"{LABELS}.where(labels >= rank, -100), reduction='sum') / (labels >= rank).sum()",
        "model(x)[: 3 - rank].sum() / (12 - 4 * rank)",
    ],
)
def test_counts_of_labels_and_of_a_sum_that_is_divided_are_found(tmp_path: Path, loss: str) -> None:
    assert "in the mean over all" in warned(tmp_path, loss=loss)


def test_equal_numbers_of_labels_get_no_warning(tmp_path: Path) -> None:
    assert not notes(tmp_path, loss=f"{LABELS}.where(labels > 0, -100))")


def test_a_term_divided_by_a_count_over_all_ranks_is_named(tmp_path: Path) -> None:
    [error] = checked(tmp_path, loss=BESIDE.format(mean=MEAN, count="count")).errors
    assert error.rule.id == "GM109"
    assert not notes(tmp_path, loss=BESIDE.format(mean=MEAN, count="(count / world)"))


def test_a_missing_sum_is_named_before_a_factor_that_the_other_gradients_have_in_common(
    tmp_path: Path,
) -> None:
    text = WRONG["tower_without_copy"].path.read_text()
    summed = "        grad = grad.contiguous().clone()\n        dist.all_reduce(grad, group=ctx.group)\n"
    assert summed in text
    script = tmp_path / "train.py"
    script.write_text(text.replace(summed, ""))  # so that DDP's mean halves the others
    [found] = check_script(Target(str(script)), ranks=4, steps=2).errors
    assert found.rule.id == "GM101"
    assert "every gradient" not in found.message
