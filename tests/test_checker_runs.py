"""`gradmesh check` as it is called: scripts with arguments, modules and tests, run on processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradmesh.checker import run

pytestmark = pytest.mark.processes

TRAINING = """
import sys, torch, torch.distributed as dist

def train(steps, summed):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    norm, head = torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)
    parameters = [*norm.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        loss = (head(norm(torch.randn(6, 8))) - torch.randn(6, 4)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        for parameter in parameters if summed else head.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    dist.destroy_process_group()
"""


def check(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], list[str]]:
    """The exit status, what it prints as JSON, and the rules of that."""
    (folder / "training.py").write_text(TRAINING)
    (folder / "train.py").write_text(
        "import sys, training\ntraining.train(int(sys.argv[1]), '--all' in sys.argv)\n"
    )
    (folder / "test_train.py").write_text("import training\ndef test_it():\n    training.train(5, False)\n")
    done = subprocess.run(
        [sys.executable, "-m", "gradmesh", "check", "--json", *arguments],
        cwd=folder,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    return done.returncode, report, [finding["rule"] for finding in report["findings"]]


def test_a_script_is_given_its_arguments_and_its_line_is_named(tmp_path: Path) -> None:
    status, report, rules = check(tmp_path, "train.py", "-n", "2", "--", "1")
    assert (status, rules, report["ranks"], report["steps"]) == (1, ["GM101"], 2, 1)
    finding: Any = report["findings"][0]
    assert (Path(finding["at"]["file"]).name, finding["at"]["text"]) == ("training.py", "optimizer.step()")
    assert finding["ranks"] == [0, 1]


WRAPPED = """
import torch, torch.distributed as dist

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
    torch.manual_seed(dist.get_rank())
    model(torch.randn(2, 4)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    dist.destroy_process_group()

main()
"""


def test_a_wrapper_that_outlives_its_group_is_no_deadlock(tmp_path: Path) -> None:
    """One check in five was one: Gloo's destructor, and the thread that it waits for, both want the GIL."""
    (tmp_path / "train.py").write_text(WRAPPED)
    for _ in range(6):
        verdict = run.check_script(run.Target(str(tmp_path / "train.py")), ranks=2, timeout=30.0)
        assert (verdict.status, verdict.findings, verdict.followed) == ("complete", (), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["train.py", "--", "1", "--all"], 0),
        (["train.py", "--steps", "3", "--", "9", "--all"], 0),
        (["-m", "train", "--", "3", "--all"], 0),
        (["-m", "train", "--", "3"], 1),
        (["-m", "pytest", "--", "-q", "-p", "no:cacheprovider", "test_train.py"], 1),
    ],
)
def test_modules_and_tests_are_run_as_python_m_runs_them(
    tmp_path: Path, arguments: list[str], status: int
) -> None:
    found, report, rules = check(tmp_path, *arguments)
    assert (found, rules) == (status, ["GM101"] * status), report


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["train.py", "--", "no number"], ["-m", "no.such.module"], ["train.py"]]
)
def test_exception_of_the_script_is_a_finding(tmp_path: Path, arguments: list[str]) -> None:
    status, report, rules = check(tmp_path, *arguments)
    assert (status, set(rules), report["status"]) == (1, {"GM501"}, "stopped"), report


def test_a_rank_that_takes_its_time_behind_another_that_has_ended_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_GRACE", 0.2)
    script = tmp_path / "late.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    time.sleep(1.5)\nprint('over')\n")
    found = run.recorded(run.Target(str(script)), ranks=2, steps=2, timeout=60.0)
    assert (found.stuck, found.output) == (False, ["over", "over"])


READS_LATE = """
import os, time, torch.distributed as dist
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
if os.environ["RANK"] == "0":
    store.set("said", "yes")
else:
    time.sleep(0.5)
    print(store.get("said").decode())
"""


def test_a_rank_that_has_ended_keeps_the_store_for_one_that_reads_it_later(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(READS_LATE)
    found = run.recorded(run.Target(str(script)), ranks=2, steps=2, timeout=60.0)
    assert [tape and tape.ended for tape in found.tapes] == ["returned"] * 2, found.output
    assert found.output[1].endswith("yes")


@pytest.mark.timed
def test_a_rank_that_waits_behind_one_that_has_failed_is_ended_soon(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    1 / 0\ntime.sleep(100)\n")
    found = run.recorded(run.Target(str(script)), ranks=2, steps=2, timeout=60.0)
    assert found.stuck
    assert found.seconds < 20
    assert "ZeroDivisionError" in found.output[1]


def test_rank_killed_by_a_signal_is_reported_with_its_line(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(
        "import ctypes, os\nimport torch\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\ndist.all_reduce(torch.ones(2))\n"
        "if os.environ['RANK'] == '1':\n    ctypes.string_at(0)\ndist.all_reduce(torch.ones(2))\n"
    )
    (found,) = run.check_script(run.Target(str(script)), ranks=2).findings
    assert (found.rule.id, found.ranks) == ("GM501", (1,))
    assert "rank 1 was killed by SIGSEGV" in found.message
    assert found.at is not None
    assert (found.at.line, found.at.text) == (7, "ctypes.string_at(0)")


def test_a_missing_module_is_reported_with_where_to_install_it(tmp_path: Path) -> None:
    script = tmp_path / "imports.py"
    script.write_text("import torch\nimport no_such_module.part\n")
    (found,) = run.check_script(run.Target(str(script)), ranks=2).findings
    assert found.rule.id == "GM501"
    assert "ModuleNotFoundError: No module named 'no_such_module'" in found.message
    assert found.remedy == f"Install no_such_module beside gradmesh, in {sys.prefix}."


def test_an_error_of_gradmesh_is_reported_with_every_ranks_call_and_its_own_remedy(tmp_path: Path) -> None:
    script = tmp_path / "differs.py"
    script.write_text(
        "import torch\nimport gradmesh as gm\ngm.init()\ngm.all_gather(torch.ones(2 + gm.rank(), 3))\n"
    )
    (found,) = run.check_script(run.Target(str(script)), ranks=2).findings
    assert found.rule.id == "GM501"
    assert "MismatchError: gradmesh.all_gather: the ranks' calls do not match" in found.message
    for rank in (0, 1):
        assert (
            f"rank {rank}: all_gather(dim=0, dst=gm.R, sizes=equal) of float32[{2 + rank}, 3]"
            in found.message
        )
    assert found.remedy.startswith('if the sizes differ on purpose, pass sizes="auto" or sizes=(2, 3)')


@pytest.mark.parametrize(("number", "name"), [(int(signal.SIGKILL), "SIGKILL"), (40, "signal 40")])
def test_signal_is_reported_by_name(number: int, name: str, tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(f"import os\nif os.environ['RANK'] == '0':\n    os.kill(os.getpid(), {number})\n")
    (found,) = run.check_script(run.Target(str(script)), ranks=2).findings
    assert (found.rule.id, found.ranks) == ("GM501", (0,))
    assert f"rank 0 was killed by {name}" in found.message


def test_processes_that_a_script_starts_end_with_the_check_also_where_it_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "starts.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(f'pids.{os.environ[\"RANK\"]}.new', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "os.rename(f'pids.{os.environ[\"RANK\"]}.new', f'pids.{os.environ[\"RANK\"]}')\n"
        "time.sleep(600)\n"
    )
    check = subprocess.Popen(
        [sys.executable, "-m", "gradmesh", "check", "starts.py", "-n", "2"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert _comes_true(lambda: len(list(tmp_path.glob("pids.?"))) == 2, 200)
        pids = [int(pid) for path in tmp_path.glob("pids.?") for pid in path.read_text().split()]
        assert all(map(_is_alive, pids))
    finally:
        check.kill()
        check.wait()
    assert _comes_true(lambda: not any(map(_is_alive, pids)), 30), pids


def test_a_model_that_is_made_on_the_meta_device_is_checked_with_the_values_that_it_is_loaded_with(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    for _ in range(2):
        model(torch.empty(3, 8))  # what shapes there are
model.to_empty(device="cpu")
torch.manual_seed(0)
for p in model.parameters():
    nn.init.normal_(p)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(1 + dist.get_rank())
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(6, 8)).square().mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
""")
    verdict = run.check_script(run.Target(str(script)), ranks=2, steps=2)
    assert not verdict.findings, verdict
    assert (verdict.status, verdict.followed) == ("complete", 2)


REDISTRIBUTING = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
w = torch.nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]))
x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
optimizer = torch.optim.SGD([w], lr=0.1)
for _ in range(2):
    whole = w.redistribute(mesh, [Replicate()]) if ASKED else w
    y = x @ whole
    y.redistribute(mesh, [Replicate()]).square().sum().backward()
    w.grad = w.grad.redistribute(mesh, [Shard(0)])
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.torch_at_least("2.11", "DTensor tells not of all calls what it redistributes")
@pytest.mark.parametrize("asked", [False, True])
def test_redistributions_of_dtensors_are_listed_where_the_program_does_not_ask_for_them(
    tmp_path: Path, asked: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(REDISTRIBUTING.replace("ASKED", str(asked)))
    verdict = run.check_script(run.Target(str(script)), ranks=2, steps=2)
    assert not verdict.findings
    lines = [line for each in verdict.redistributions if each.at and (line := each.at.text).startswith("y =")]
    assert lines == ([] if asked else ["y = x @ whole"])
    if not asked:
        (found,) = [each for each in verdict.redistributions if each.at and each.at.text in lines]
        assert (found.operator, found.before, found.after) == ("aten.mm", "S(0)", "R")
        assert (found.size, found.times) == (8 * 8 * 4, 2)
    command = [sys.executable, "-m", "gradmesh", "check", "--redistributions", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert ("aten.mm" in done.stdout) is not asked, done


TRAINS = """
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
head = torch.nn.Linear(4, 1)
head.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
for _ in range(2):
    optimizer.zero_grad()
    head(used(model(torch.randn(3, 4)))).square().mean().backward()
    optimizer.step()
"""

USED = {
    "complex tensor sent by its parts": """
import torch, torch.distributed as dist
def used(x):
    cache = torch.polar(torch.ones(2), torch.tensor([0.5, 1.5]))
    dist.broadcast(torch.view_as_real(cache), 0)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (2, 2))) * cache).flatten(-2)
""",
    "operator whose backward is no derivative": """
import torch, torch.distributed as dist
@torch.library.custom_op("script::reversed", mutates_args=())
def reverse(x: torch.Tensor) -> torch.Tensor:
    return x.clone()
reverse.register_autograd(lambda ctx, grad: -grad)
def used(x):
    return reverse(x) + x.square()
""",
    "operator on sparse and meta tensors": """
import torch, torch.distributed as dist
library = torch.library.Library("sparse_of_script", "FRAGMENT")
library.define("rows(Tensor x) -> Tensor")
library.impl("rows", lambda x: torch.tensor(float(x.shape[0])), "SparseCPU")
library.impl("rows", lambda x: torch.empty((), device="meta"), "Meta")
def used(x):
    assert torch.ops.sparse_of_script.rows(torch.empty(3, device="meta")).is_meta
    return x * torch.ops.sparse_of_script.rows(torch.eye(4).to_sparse())
""",
}


@pytest.mark.parametrize("name", USED)
def test_what_models_use_is_followed_without_a_finding(name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(USED[name] + TRAINS)
    verdict = run.check_script(run.Target(str(script)), ranks=2)
    assert not verdict.findings, verdict
    assert verdict.followed == 2, verdict.notes


UNSEEDED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
"""


def test_ranks_that_seed_nothing_draw_other_numbers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNSEEDED)
    verdict = run.check_script(run.Target(str(script)), ranks=2)
    assert not verdict.findings
    assert verdict.followed == 2


MANY_TERMS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
torch.manual_seed(1 + dist.get_rank())
for _ in range(2):
    optimizer.zero_grad()
    sum((model(torch.randn(2, 4)).square().mean() for _ in range(1200)), torch.zeros(())).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
"""


@pytest.mark.slow
def test_a_loss_of_more_terms_than_python_nests_calls_is_followed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MANY_TERMS)
    verdict = run.check_script(run.Target(str(script)), ranks=2)
    assert not verdict.findings
    assert verdict.followed == 2, verdict.notes


SECOND_STEP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(1 + dist.get_rank())
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(6, 8)).square().sum().backward()
    for p in model.parameters():
        if step != 1 or p.ndim > 1:
            dist.all_reduce(p.grad)
    optimizer.step()
"""


def test_a_finding_has_the_step_that_shows_it_and_a_verdict_its_memory(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SECOND_STEP)
    verdict = run.check_script(run.Target(str(script)), ranks=2, steps=3)
    assert [(each.rule.id, each.subject, each.step) for each in verdict.findings] == [("GM101", "bias", 2)]
    assert 2**26 < verdict.memory < 2**34


def _comes_true(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
