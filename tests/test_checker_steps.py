"""Gradients that a program replaces, scales and steps with by itself, and factors that all of them share."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmesh.checker.findings import Verdict
from gradmesh.checker.judging import judge
from gradmesh.checker.run import Target, check_script
from tests.scripts import RIGHT, WRONG

pytestmark = pytest.mark.processes

SCRIPT = """
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.Generator().manual_seed(dist.get_rank())


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.new_empty(x.shape[0] // 2, *x.shape[1:])
        dist.reduce_scatter_tensor(out, x)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(2 * grad.shape[0], *grad.shape[1:])
        dist.all_gather_into_tensor(out, grad.contiguous())
        return out


for _ in range(2):
    model.zero_grad()
    x = torch.randn(3, 2, 4, generator=rows)
    {loss}
    for p in model.parameters():
        {sync}
    {step}
"""
MEAN = "model(x).square().mean().backward()"
SUM = "dist.all_reduce(p.grad)"
SHOWN = """loss = model(x).square().mean()
    loss.backward()
    shown = loss.detach()
    dist.all_reduce(shown)"""
REPLACED = """parts = [torch.empty_like(p.grad) for _ in range(2)]
        dist.all_gather(parts, p.grad)
        p.grad = torch.stack(parts).sum(0)
        p.grad /= 64.0"""
DISPLACED = """with torch.no_grad():
        moved = [0.5 * p.grad for p in model.parameters()]
        torch._foreach_add_(list(model.parameters()), moved)
    model.zero_grad()
    model(x).square().mean().backward()
    {again}
    with torch.no_grad():
        torch._foreach_sub_(list(model.parameters()), moved)
    optimizer.step()"""
BY_DATA = """for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)"""
OF_A_COPY = """flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    for p, part in zip(model.parameters(), flat.split([16, 4])):
        p.data.sub_(part.view_as(p), alpha=0.1)"""
ASKED = """for p, g in zip(model.parameters(), torch.autograd.grad(model(x).square().mean(), [*model.parameters()])):
        p.grad = g"""
LATE = """if model.bias.grad is None:
            model.bias.grad = torch.zeros(4)
        dist.all_reduce(p.grad)"""
ONE_USES_IT = """with torch.no_grad():
        model(x)
    F.linear(x, model.weight, model.bias if dist.get_rank() else None).square().mean().backward()"""
ATTENTION = """heads = model(x).view(3, 2, 2, 2).transpose(1, 2)
    F.scaled_dot_product_attention(heads, heads, heads).square().mean().backward()"""
TWICE = f"{MEAN}\n    {MEAN.replace('x', '2 * x')}"
SCATTERED = "Scatter.apply(model(x).tanh().flatten()).square().mean().backward()"
RAW = """y = model(x)
    out = torch.cat([y, y])
    dist.all_gather_into_tensor(out, y)
    out[: 3 * (1 + dist.get_rank())].square().mean().backward()"""
CLIPPED = """torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()"""


def checked(folder: Path, loss: str = MEAN, sync: str = SUM, step: str = "optimizer.step()") -> Verdict:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(loss=loss, sync=sync, step=step))
    return check_script(Target(str(script)), ranks=2, steps=2, timeout=60.0)


def rules(verdict: Verdict) -> set[str]:
    return {each.rule.id for each in verdict.findings}


def is_judged(verdict: Verdict) -> bool:
    return verdict.status == "complete" and verdict.steps == 2 and not verdict.notes


def test_a_gradient_that_is_replaced_is_still_known(tmp_path: Path) -> None:
    verdict = checked(tmp_path, sync=REPLACED)
    assert not verdict.findings, verdict.findings[0].message
    assert is_judged(verdict)


def test_a_gradient_that_was_asked_for_is_known_when_it_is_clipped(tmp_path: Path) -> None:
    verdict = checked(tmp_path, loss=ASKED, step=CLIPPED)
    assert not verdict.findings, verdict.findings[0].message
    assert is_judged(verdict)


def test_a_gradient_that_one_rank_makes_of_zeros_is_known(tmp_path: Path) -> None:
    verdict = checked(tmp_path, loss=ONE_USES_IT, sync=LATE, step=CLIPPED)
    assert not verdict.findings, verdict.findings[0].message
    assert is_judged(verdict)


def test_a_step_through_data_is_a_step(tmp_path: Path) -> None:
    right = checked(tmp_path, step=BY_DATA)
    assert not right.findings, right.findings[0].message
    assert is_judged(right)
    assert "GM101" in rules(checked(tmp_path, sync="pass", step=BY_DATA))


def test_loss_summed_in_place_after_its_backward_is_traced(tmp_path: Path) -> None:
    verdict = checked(tmp_path, loss=SHOWN)
    assert not verdict.findings, verdict.findings[0].message
    assert is_judged(verdict)
    assert "GM101" in rules(checked(tmp_path, loss=SHOWN, sync="pass"))


def test_a_step_by_hand_along_something_else_is_a_note(tmp_path: Path) -> None:
    verdict = checked(tmp_path, sync="pass", step=OF_A_COPY)
    assert not verdict.findings, verdict.findings[0].message
    assert any("written by hand" in note for note in verdict.notes)


def test_attention_without_dropout_is_traced(tmp_path: Path) -> None:
    right = checked(tmp_path, loss=ATTENTION)
    assert not right.findings, right.findings[0].message
    assert is_judged(right)
    assert "GM101" in rules(checked(tmp_path, loss=ATTENTION, sync="pass"))


@pytest.mark.parametrize("divided", ["p.grad /= 2", "p.grad /= 4"])
def test_gradients_may_be_divided_by_the_backwards_of_a_step(tmp_path: Path, divided: str) -> None:
    verdict = checked(tmp_path, loss=TWICE, sync=f"{SUM}\n        {divided}")
    assert not verdict.findings, verdict.findings[0].message
    assert is_judged(verdict)


def test_gradients_that_are_averaged_twice_are_named(tmp_path: Path) -> None:
    halved = "\n        p.grad /= 2"
    assert "GM109" in rules(checked(tmp_path, sync=SUM + 2 * halved))
    assert "GM109" in rules(checked(tmp_path, loss=TWICE, sync=SUM + 3 * halved))


def test_reduce_scatter_that_copies_on_wait_is_traced(tmp_path: Path) -> None:
    verdict = checked(tmp_path, loss=SCATTERED)
    assert not verdict.findings, verdict.findings[0].message
    assert is_judged(verdict)


def test_a_call_of_torch_that_has_another_name_by_now_is_seen_at_the_line_of_the_program(
    tmp_path: Path,
) -> None:
    [finding] = checked(tmp_path, loss=RAW).findings
    assert finding.rule.id == "GM106"
    assert finding.at is not None
    assert finding.at.text.startswith("dist.all_gather_into_tensor")


@pytest.mark.parametrize(
    ("name", "text", "instead", "rule"),
    [
        (
            "flat_master_shards",
            "dist.reduce_scatter_tensor(own, gradients)",
            "own.copy_(gradients.chunk(world)[rank])",
            "GM103",
        ),
        (
            "scaled_clipped_noised",
            "noise = torch.Generator().manual_seed(5)",
            "noise = torch.Generator().manual_seed(rank)",
            "GM201",
        ),
        (
            "sparse_embedding",
            "bags, head = DDP(nn.EmbeddingBag(20, 4, sparse=True)), DDP(",
            "bags, head = nn.EmbeddingBag(20, 4, sparse=True), DDP(",
            "GM101",
        ),
        ("deliberate_gradients", "model = DDP(Net())", "model = Net()", "GM101"),
        ("last_layer_held_still", "if step == 0:", "for last in [model]:", "GM103"),
    ],
)
def test_fault_beside_intended_gradient_changes_is_found(
    tmp_path: Path, name: str, text: str, instead: str, rule: str
) -> None:
    source = RIGHT[name].path.read_text()
    assert source.count(text) == 1
    script = tmp_path / "train.py"
    script.write_text(source.replace(text, instead))
    found = check_script(Target(str(script)), ranks=RIGHT[name].ranks).errors
    assert {finding.rule.id for finding in found} == {rule}


@pytest.mark.parametrize(
    "name",
    [
        "fsdp1",
        "flat_master_shards",
        "sparse_embedding",
        "deliberate_gradients",
        "float32_masters",
        pytest.param(
            "torch_pipelining", marks=pytest.mark.torch_at_least("2.10", "the script aborts by itself")
        ),
    ],
)
def test_intended_gradient_changes_are_not_findings(name: str) -> None:
    verdict = check_script(Target(str(RIGHT[name].path)), ranks=RIGHT[name].ranks)
    assert verdict.ok
    assert not verdict.findings


def test_unanalysable_code_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> None:
        raise RuntimeError("this cannot be done")

    monkeypatch.setattr(judge, "masks", raises)
    verdict = checked(tmp_path)
    assert verdict.ok
    assert verdict.notes[0] == "not analysed: step 1 (RuntimeError: this cannot be done)"


def test_finding_on_torch_clipping_of_shards_names_the_replacement() -> None:
    script = WRONG["clip_own_shard"]
    [finding] = check_script(Target(str(script.path)), ranks=script.ranks).errors
    assert finding.rule.id == "GM205"
    assert "clip_grad_norm_ takes the norm of what each rank holds" in finding.message
    assert "gm.nn.clip_grad_norm_" in finding.remedy
    assert "dist.all_reduce" in finding.remedy


def test_a_step_after_a_displacement_is_judged_by_its_gradients(tmp_path: Path) -> None:
    summed = "for p in model.parameters():\n        dist.all_reduce(p.grad)"
    right = checked(tmp_path, step=DISPLACED.format(again=summed))
    assert not right.findings, right.findings[0].message
    assert "GM101" in rules(checked(tmp_path, step=DISPLACED.format(again="pass")))


OWNERS = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

class Owners(torch.optim.Optimizer):  # one rank for each parameter computes its update, and sends it to the others
    def __init__(self, params):
        super().__init__(params, {{}})

    @torch.no_grad()
    def step(self):
        params = self.param_groups[0]["params"]
        flat = torch.cat([p.grad.reshape(-1) for p in params])
        {whole}
        parts = flat.split([p.numel() for p in params])
        for at, (p, part) in enumerate(zip(params, parts)):
            grad = p.grad
            {one}
            update = torch.empty_like(p)
            if at % world == rank:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(grad)
                update.copy_(momentum / momentum.norm())
            dist.broadcast(update, src=at % world)
            p.sub_(0.02 * update)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = Owners(model.parameters())
torch.manual_seed(1 + rank)
for _ in range(2):
    optimizer.zero_grad()
    (model(torch.randn(6, 5)) - torch.randn(6, 3)).square().mean().backward()
    optimizer.step()
"""


def owners(folder: Path, whole: str, one: str) -> Verdict:
    script = folder / "train.py"
    script.write_text(OWNERS.format(whole=whole, one=one))
    return check_script(Target(str(script)), ranks=2, steps=2)


@pytest.mark.parametrize(
    ("whole", "one"),
    [
        ("pass", "dist.all_reduce(grad)"),
        ("pass", "dist.reduce(grad, dst=at % world)"),
        ("dist.all_reduce(flat)", "grad = part.view_as(p)"),
        ("dist.all_reduce(flat)", "grad.copy_(part.view_as(p))"),
    ],
)
def test_an_optimizer_that_sums_gradients_in_its_step_is_a_note(whole: str, one: str, tmp_path: Path) -> None:
    verdict = owners(tmp_path, whole, one)
    assert not verdict.findings, verdict
    assert any("a sum over ranks in the optimizer's step" in note for note in verdict.notes)


def test_an_optimizer_that_sums_nothing_in_its_step_is_named(tmp_path: Path) -> None:
    assert "GM101" in rules(owners(tmp_path, "pass", "pass"))
