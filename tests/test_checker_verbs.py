"""`gradmesh check` on programs of the library's own verbs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from gradmesh.checker.findings import Verdict
from gradmesh.checker.run import Target, check_script
from tests.zoo import PROGRAMS
from tests.zoo.stepping import NAMES
from tools.check_attack.verbs import outcomes

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[1] / "examples"

CONTRASTIVE = """
import torch
import torch.distributed as dist
import gradmesh as gm

dist.init_process_group("gloo")
rank, torch_seed = dist.get_rank(), torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(2):
    own = model(torch.randn(4, 5))
    {gather}
    loss = torch.nn.functional.cross_entropy(own @ everyone.T, 4 * rank + torch.arange(4)) * (1 + rank)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
"""

RIGHT = {
    "at once": "everyone = gm.all_gather(own)",
    "async": "everyone = gm.all_gather(own, async_op=True).wait()",
    "together": "with gm.coalesce():\n        one = gm.all_gather(own, async_op=True)\n"
    "    everyone = one.wait()",
    "of structures": "everyone = gm.all_gather({'x': own})['x']",
    "around": "parts = [gm.shift(own, offset=hop) for hop in range(gm.world_size())]\n"
    "    everyone = torch.cat([parts[(rank - at) % len(parts)] for at in range(len(parts))])",
}

WRONG = "everyone = gm.all_gather(own, dst=gm.I)"


def checked(tmp_path: Path, text: str, ranks: int = 2) -> Verdict:
    script = tmp_path / "train.py"
    script.write_text(text)
    return check_script(Target(str(script)), ranks=ranks)


@pytest.mark.parametrize("way", RIGHT)
def test_right_program_is_fully_traced_without_findings(way: str, tmp_path: Path) -> None:
    verdict = checked(tmp_path, CONTRASTIVE.format(gather=RIGHT[way]))
    assert (verdict.status, verdict.steps, verdict.findings, verdict.notes) == ("complete", 2, (), ())


def test_result_of_the_wrong_type_is_reported_at_its_call_with_the_fix(tmp_path: Path) -> None:
    found = checked(tmp_path, CONTRASTIVE.format(gather=WRONG), ranks=3).findings[0]
    assert (found.rule.id, found.subject) == ("GM103", "gm.all_gather")
    assert found.at is not None
    assert found.at.text == WRONG
    assert "dst=gm.R" in found.remedy


def test_wrong_type_of_async_result_is_reported_at_the_parameters(tmp_path: Path) -> None:
    started = WRONG.replace("gm.I)", "gm.I, async_op=True).wait()")
    found = checked(tmp_path, CONTRASTIVE.format(gather=started), ranks=3).findings[0]
    assert (found.rule.id, found.subject) == ("GM103", "0.weight")


def test_a_gather_without_gradients_is_stopped_on_purpose(tmp_path: Path) -> None:
    stopped = "with torch.no_grad():\n        everyone = gm.all_gather(own)"
    assert checked(tmp_path, CONTRASTIVE.format(gather=stopped)).findings == ()


def test_rounded_communication_is_not_judged(tmp_path: Path) -> None:
    rounded = "everyone = gm.all_gather(own, comm_dtype=torch.bfloat16)"
    verdict = checked(tmp_path, CONTRASTIVE.format(gather=rounded))
    assert verdict.findings == ()
    assert "all_gather rounds what travels" in verdict.notes[0]


def test_losses_of_an_objective_are_terms_of_one_though_all_ranks_read_its_value(tmp_path: Path) -> None:
    text = CONTRASTIVE.format(gather="everyone = gm.all_gather(own)").replace(
        " * (1 + rank)\n", "\n    loss = gm.objective(loss, weights=1 + rank)\n"
    )
    verdict = checked(tmp_path, text)
    assert (verdict.status, verdict.findings, verdict.notes) == ("complete", (), ())


UNEVEN = """
import torch
import gradmesh as gm

gm.init("gloo")
torch.manual_seed(gm.rank())
own, other = (torch.nn.Parameter(torch.randn(4)) for _ in range(2))
for step in range(2):
    total = gm.all_reduce(own, dst={dst})
    own.grad = other.grad = None
    ({weight} * total.sum() + other.square().sum()).backward()
    torch.optim.SGD([own, other], lr=0.1).step()
"""


def test_differing_gradients_of_an_invariant_result_are_found_though_each_is_a_multiple(
    tmp_path: Path,
) -> None:
    """A third and two thirds of the gradient could be learning rates that the program chose, but for the type I."""
    weight = "(1 + gm.rank())"
    assert checked(tmp_path, UNEVEN.format(dst="gm.R", weight=weight)).findings == ()
    found = checked(tmp_path, UNEVEN.format(dst="gm.I", weight=weight)).findings
    assert [(each.rule.id, each.subject) for each in found] == [("GM103", "gm.all_reduce")]
    assert found[0].at is not None
    assert "dst=gm.I" in found[0].at.text
    assert "gradient of parameter 0 " in found[0].message


TWICE = """
import torch
import gradmesh as gm

gm.init("gloo")
torch.manual_seed(0)
first = torch.nn.Parameter(torch.randn(8, 4).chunk(2)[gm.rank()].clone())
second = torch.nn.Parameter(torch.randn(6, 8).chunk(2, 1)[gm.rank()].clone())
head = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD([first, second, *head.parameters()], lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    hidden = gm.all_reduce((torch.randn(5, 4) @ first.T).tanh() @ second.T, dst=gm.I)
    loss = (head(hidden) - torch.randn(5, 3)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    first.grad = torch.from_numpy(first.grad.numpy() * 0.3)
    optimizer.step()
"""


def test_an_invariant_result_with_two_backwards_is_right_though_a_gradient_is_scaled(tmp_path: Path) -> None:
    assert checked(tmp_path, TWICE).findings == ()


FORCES = """
import torch
import gradmesh as gm

gm.init("gloo")
rank = gm.rank()
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.SiLU(), torch.nn.Linear(8, 1)).double()
torch.manual_seed(0)
for parameter in model.parameters():
    torch.nn.init.normal_(parameter)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(2):
    places = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    around = gm.halo_exchange(places, halo=1, wrap=True)
    energy = model(around[:-2] - 2 * around[1:-1] + around[2:]).sum()
    (slope,) = torch.autograd.grad(energy, places, create_graph=True)
    loss = {loss}
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = {gradient}
    optimizer.step()
"""


def test_second_derivatives_through_verbs_are_traced(tmp_path: Path) -> None:
    right = FORCES.format(
        loss="(slope - rank).square().sum()", gradient="gm.all_reduce(parameter.grad, dst=gm.R)"
    )
    verdict = checked(tmp_path, right)
    assert (verdict.findings, verdict.notes) == ((), ())
    found = checked(
        tmp_path, right.replace("gm.all_reduce(parameter.grad, dst=gm.R)", "parameter.grad")
    ).findings
    assert {each.rule.id for each in found} == {"GM101"}


def test_complex_parameters_count_with_both_parts(tmp_path: Path) -> None:
    text = CONTRASTIVE.replace(
        "torch.nn.Linear(7, 3))", "torch.nn.Linear(7, 3)).to(torch.complex64)"
    ).replace("torch.randn(4, 5)", "torch.randn(4, 5, dtype=torch.complex64)")
    text = text.replace("own @ everyone.T", "(own @ everyone.mH).abs()")
    assert checked(tmp_path, text.format(gather=RIGHT["at once"])).findings == ()
    real = "real = parameter.grad.real.clone()\n        dist.all_reduce(real)\n        "  # and not the imaginary part
    real += "parameter.grad = torch.complex(real, parameter.grad.imag)"
    wrong = text.replace("dist.all_reduce(parameter.grad)", real)
    assert checked(tmp_path, wrong.format(gather=RIGHT["at once"])).findings


def test_a_script_may_follow_types_itself(tmp_path: Path) -> None:
    begins = "    block = gm.typed()\n    types = block.__enter__()\n    own = model"
    ends = "    assert str(types.of(everyone)) == \"{'world': R}\"\n    block.__exit__(None, None, None)\n"
    text = CONTRASTIVE.replace("    own = model", begins).format(gather=RIGHT["async"]) + ends
    verdict = checked(tmp_path, text)
    assert (verdict.status, verdict.steps, verdict.findings, verdict.notes) == ("complete", 2, (), ())


def test_transforms_of_torch_func_run_under_the_check(tmp_path: Path) -> None:
    text = CONTRASTIVE.format(gather="everyone = torch.func.vmap(gm.all_gather, 1, 1)(own)").replace(
        "loss.backward()", "loss.backward(); torch.func.grad(lambda x: x.square().sum())(torch.ones(2))"
    )
    verdict = checked(tmp_path, text)
    assert (verdict.status, verdict.findings) == ("complete", ())


RANDOM = 6


def test_random_programs_are_right_and_a_fault_in_them_is_found(tmp_path: Path) -> None:
    found = Counter(each.kind for each in outcomes(5, RANDOM, tmp_path))
    assert found["accused"] == found["missed"] == 0, found
    assert found["right"] >= RANDOM // 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_many_random_programs_are_right_and_a_fault_in_them_is_found(seed: int, tmp_path: Path) -> None:
    found = Counter(each.kind for each in outcomes(seed, 40, tmp_path))
    assert found["accused"] == found["missed"] == 0, found
    assert found["right"] >= 20
    assert found["found"] > 0


SOME = ("clip_with_one_loss", "ring_attention", "graph_energy", "trained_under_fsdp2", "verb_send_and_recv")


@pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_nothing_is_found_in_the_right_programs_of_verify(name: str) -> None:
    ranks = PROGRAMS[name].options.get("world_size", 2)
    verdict = check_script(Target("tests.zoo.stepping", module=True, args=(name,)), ranks=ranks)
    assert (verdict.status, verdict.steps, verdict.findings, verdict.notes) == ("complete", 2, (), ())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_nothing_is_found_in_the_examples(name: str) -> None:
    verdict = check_script(Target(str(EXAMPLES / f"{name}.py")), ranks=2)
    assert (verdict.status, verdict.findings) == ("complete", ())
