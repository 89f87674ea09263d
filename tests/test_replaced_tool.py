"""The tool that replaces collectives of other libraries: what it finds, how it replaces, and its page."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradmesh as gm
from tools import report
from tools.replaced import __main__ as command
from tools.replaced import own_tests, page, sources
from tools.replaced.cases import Case, World, gathered, rows, summed, truth
from tools.replaced.ranks import measure, together
from tools.replaced.repositories import REPOSITORIES


def forked(test: Any) -> Any:
    """A test whose ranks are forked from this process, and compute gradients."""
    skipped = pytest.mark.skipif(
        torch.version.cuda is not None, reason="built with CUDA: no autograd in a fork of where it ran"
    )
    return pytest.mark.processes(skipped(test))


class _Unsummed(torch.autograd.Function):
    """A gather whose backward forgets the other ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.rows = len(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.split(ctx.rows)[dist.get_rank()]


class _Once(_Unsummed):
    """A gather whose first derivative is right, and the second is not."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        held = grad.detach().clone()
        dist.all_reduce(held)
        return held.split(ctx.rows)[dist.get_rank()]


def _fails(x: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 1:
        raise ValueError("on one rank")
    return gm.all_gather(x)


CASE = Case("gather", lambda m, x, w: m.gather(x), gathered(), rows(0, 3), group=False)
NOTHING = SimpleNamespace(prepare=None)


def _found(gather: Any, situation: str = "even", case: Case = CASE) -> dict[str, Any]:
    return measure(case, NOTHING, SimpleNamespace(gather=gather), situation, "gloo", True)


@forked
def test_a_right_gather_is_right_of_each_order_and_in_a_subgroup() -> None:
    for situation in ("even", "subgroup"):
        found = _found(gm.all_gather, situation)
        assert max(found.values()) < page.RIGHT
    auto = _found(lambda x: gm.all_gather(x, sizes="auto"), "uneven")
    assert max(auto.values()) < page.RIGHT


@forked
def test_a_wrong_first_derivative_is_found() -> None:
    found = _found(_Unsummed.apply)
    assert found["value"] == 0
    assert found["first"] > 0.1


@forked
def test_a_wrong_second_derivative_is_found() -> None:
    found = _found(_Once.apply)
    assert max(found["value"], found["first"]) < page.RIGHT
    assert isinstance(found["second"], str) or found["second"] > 0.1


@forked
def test_a_wrong_value_a_wrong_shape_and_an_error_are_found() -> None:
    assert _found(lambda x: gm.all_gather(x) + 1e-6)["value"] > page.RIGHT
    assert _found(lambda x: x)["raises"].startswith("WrongShape")
    assert _found(_fails)["raises"] == "ValueError: on one rank"


@pytest.mark.processes
def test_a_missing_argument_is_no_failure() -> None:
    module = SimpleNamespace(gather=_Unsummed.apply)
    assert measure(CASE, NOTHING, module, "subgroup", "gloo", False) == {"absent": "no argument"}


def test_answers_of_ranks_are_the_worst_of_them() -> None:
    fine = {"value": 0.0, "first": 1e-17, "second": 1e-16, "done": True}
    assert together([fine, {**fine, "first": 0.5}, {"done": True}]) == {
        "value": 0.0,
        "first": 0.5,
        "second": 1e-16,
    }
    assert together([fine, {**fine, "second": "no"}])["second"] == "no"
    later = {"raises": "RuntimeError: Connection reset by peer", "order": 1}
    assert together([later, {"raises": "ValueError: the cause", "order": 2}]) == {
        "raises": "ValueError: the cause"
    }
    assert together([fine, {}]) == {"raises": "it hangs"}


def test_the_truth_of_equal_results_counts_their_loss_once() -> None:
    world, case = World((2, 2)), Case("sum", lambda m, x, w: x, summed, rows(0, 1))
    once = Case("sum", lambda m, x, w: x, summed, rows(0, 1), once=True)
    result = summed(case.operands(world), world)[0]
    weights = truth(once, world).weights[0][0]
    assert torch.allclose(truth(once, world).first[1], 3 * weights * result**2)
    assert not torch.allclose(truth(case, world).first[1], truth(once, world).first[1])


def test_definitions_are_replaced_where_the_first_stood() -> None:
    text = "import a\n\n\n@a.b\nclass One:\n    x = 1\n\n\ndef two():\n    return One\n\n\nthree = 3\n"
    found = sources.swapped(text, ("One", "two"), "from ours import One, two\n")
    assert found == "import a\n\n\nfrom ours import One, two\n\n\n\n\nthree = 3\n"
    with pytest.raises(ValueError, match="not found: four"):
        sources.swapped(text, ("One", "four"), "")


def test_their_tests_count_once_for_all_ranks(tmp_path: Path) -> None:
    files = [tmp_path / f"{rank}.outcomes" for rank in range(3)]
    files[0].write_text("started a\npassed a\nstarted b\npassed b\nstarted c\nskipped c\nstarted d\n")
    files[1].write_text("started a\npassed a\nstarted b\nfailed b\nstarted e\nxfailed e\n")
    outcomes = own_tests.merged(files)  # the last rank has no file
    assert own_tests.counts(outcomes) == "1 passed, 2 failed, 1 skipped"
    assert own_tests.counts({}) == "did not run"


def test_a_plugin_writes_each_outcome_at_once(tmp_path: Path) -> None:
    tests = "import os, pytest\ndef test_a(): pass\ndef test_b(): assert False\n"
    tests += "@pytest.mark.skip\ndef test_c(): pass\n@pytest.mark.xfail\ndef test_d(): assert False\n"
    tests += "def test_e(): os._exit(1)\ndef test_f(): pass\n"
    (tmp_path / "test_it.py").write_text(tests)
    file = tmp_path / "outcomes"
    environment = {**os.environ, "OUTCOMES": str(file), "PYTHONPATH": str(own_tests.STANDINS)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "outcomes", "-p", "no:cacheprovider", "test_it.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert own_tests.counts(own_tests.merged([file])) == "1 passed, 2 failed, 1 skipped"


def test_texts_are_swapped_in_all_files_and_have_to_occur(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.py").write_text(f"{name} = 'nccl'\n")
    own_tests.swap(tmp_path, (("nccl", "gloo"), ("b = ", "c = ")))
    assert (tmp_path / "a.py").read_text() == "a = 'gloo'\n"
    assert (tmp_path / "b.py").read_text() == "c = 'gloo'\n"
    with pytest.raises(ValueError, match="not found: nccl"):
        own_tests.swap(tmp_path, (("nccl", "gloo"),))


_ON_GPUS = """
import torch, torch.distributed as dist
assert torch.cuda.is_available() and torch.cuda.device_count() == 3
x = torch.randn(2, device="cuda:1").cuda().to(torch.device("cuda"))
assert x.device.type == torch.nn.Linear(2, 2, device="cuda").to("cuda:0").weight.device.type == "cpu"
generator = torch.Generator(device="cuda").manual_seed(0)
assert isinstance(generator, torch.Generator) and torch.rand(2, generator=generator, device="cuda").shape == (2,)
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.Event(enable_timing=True).record()
dist.init_process_group("nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
assert dist.get_backend() == "gloo"
"""


def test_gpus_that_are_the_cpu() -> None:
    paths = {"PYTHONPATH": str(own_tests.STANDINS / "cuda"), "STANDIN_GPUS": "3"}
    subprocess.run([sys.executable, "-c", _ON_GPUS], env={**os.environ, **paths}, check=True)


def test_attention_without_kernels_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(own_tests.STANDINS / "flash_attn"))
    flash = importlib.import_module("flash_attn")
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, rows, heads, 4, dtype=torch.float64, generator=draw, requires_grad=True)
        for rows, heads in ((3, 4), (5, 2), (5, 2))
    )
    later = torch.ones(3, 5, dtype=torch.bool).tril(2)
    for causal in (False, True):
        heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        whole = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=later if causal else None, enable_gqa=True
        ).transpose(1, 2)
        out, lse, _ = flash.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
        bounds = [torch.tensor([0, rows]) for rows in (3, 5)]
        packed = flash.flash_attn_varlen_func(q[0], k[0], v[0], *bounds, 3, 5, causal=causal)
        expected = torch.autograd.grad((whole**2).sum(), (q, k, v))
        for found in (out, packed[None]):
            assert torch.allclose(found, whole)
            grads = torch.autograd.grad((found**2).sum(), (q, k, v))
            assert all(torch.allclose(*pair) for pair in zip(grads, expected, strict=True))
        assert lse.shape == (1, 4, 3)


def _run(first: object, second: object = 1e-17) -> dict[str, Any]:
    even = {"value": 0.0, "first": first, "second": second}
    return {"even": even, "uneven": {"raises": "ValueError: no"}, "subgroup": {"absent": "no argument"}}


def test_a_cell_has_both_sides() -> None:
    function = {
        "before gloo": _run(0.5),
        "before shm": _run(0.5),
        "after gloo": _run(1e-17),
        "after shm": _run(3e-8),
    }
    assert page.cell(function, "gradient") == "**wrong** by 0.5 / right to 3e-08"
    assert page.cell(function, "second") == "right / right"
    assert page.cell(function, "uneven") == "**raises** / **raises**"
    assert page.cell(function, "subgroup") == "no argument / no argument"
    function["before gloo"] = _run(1e-17, "RuntimeError: no lists of different sizes")
    assert page.cell(function, "second") == "right (shm) / right"
    assert page.cell({**function, "before shm": _run(0.0, "no")}, "second") == "**raises** / right"


def test_the_page_of_replaced_collectives_is_that_of_the_measurements() -> None:
    data = json.loads(command.DATA.read_text())
    assert command.PAGE.read_text() == page.page(data)
    assert report.PAGES["docs/replaced.md"] == "tools.replaced.__main__"
    by_name = {each.name: each for each in REPOSITORIES}
    for row in data["rows"]:
        repository = by_name[row["name"]]
        assert row["source"] == repository.source.label
        assert row["files"] == [each.path for each in repository.files]
        assert list(row["functions"]) == [case.name for case in repository.cases]
    assert [row["name"] for row in data["rows"]] == list(by_name)


FEWER = {"torchtitan": 1}
"""Tests that fail after; the notes of the page say why."""


def test_no_other_repository_has_fewer_tests_that_pass_after_than_before() -> None:
    for row in json.loads(command.DATA.read_text())["rows"]:
        before, after = (
            int((re.findall(r"(\d+) passed", row[side]["tests"]) or ["0"])[0]) for side in ("before", "after")
        )
        assert after >= before - FEWER.get(row["name"], 0), row["name"]


def test_what_is_replaced_has_the_gradients_of_one_process() -> None:
    for row in json.loads(command.DATA.read_text())["rows"]:
        for name, runs in row["functions"].items():
            for what in ("gradient", "second", "subgroup"):
                after = page.both(runs, what)[2]
                if what == "second" and name.startswith("llama3"):
                    continue  # it keeps a kernel, which is differentiable once
                single = name.endswith(("CrossEntropy", "cross_entropy"))
                limit = page.SINGLE if single else page.RIGHT
                assert after is None or (isinstance(after, float) and after < limit), (
                    row["name"],
                    name,
                    what,
                )


def test_each_text_is_short_and_used() -> None:
    used = {each.text for repository in REPOSITORIES for each in repository.files}
    texts = {path.name: path.read_text().splitlines() for path in sources.TEXTS.glob("*.py")}
    assert set(texts) == used
    assert max(sum(map(bool, lines)) for lines in texts.values()) <= 35  # without the empty ones


def test_a_folder_of_fairchem_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    core = tmp_path / "core"
    (core / "common/parallelism").mkdir(parents=True)
    (core / "common/gp_utils.py").write_text('"""Groups."""\n\nrank = 0\n')
    (core / "model.py").write_text("from fairchem.core.common import gp_utils\n\ngp_utils.get_gp_rank()\n")
    assert command.main([str(core)]) == 0
    out = capsys.readouterr().out
    assert "| all | | 3 | 1 |" in out
    assert "1 names are used in 1 other files; missing: none" in out
    (core / "model.py").write_text("from fairchem.core.common import gp_utils\n\ngp_utils.unknown()\n")
    assert command.main([str(core)]) == 1
