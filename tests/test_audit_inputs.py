"""Functions that an audit has to take as they are: with a domain, other results, other dtypes, ranks that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gradmesh as gm
from gradmesh.verify import audit
from gradmesh.verify.auditing.audit import named
from gradmesh.verify.auditing.readings import distance
from tests.test_audit_kinds import function, summed

FEW = ["not-adjoint", "hangs", "backward-raises", "precision-lost", "operand-overwritten", "aborts"]
"""The kinds that matter here; the others would only cost time."""


def test_a_function_with_a_domain_is_audited_inside_of_it() -> None:
    def fn(x: Tensor) -> Tensor:
        if bool((x <= 0).any()):
            raise ValueError("positive, please")
        return gm.all_gather(x.log())

    found = audit(lambda: (fn, torch.rand(3) + 1), kinds=FEW)
    assert found.ok, found
    assert found.arrows == ("V -> R",)


def test_a_backward_that_sends_on_one_rank_only_hangs() -> None:
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return summed(grad) if dist.get_rank() == 0 else grad.clone()

    made = function(lambda ctx, x: summed(x), backward)
    assert audit(lambda: (made.apply, torch.randn(3)), kinds=FEW).kinds == ("hangs",)


@pytest.mark.parametrize(
    "layer", [torch.nn.LayerNorm(8), torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh())]
)
def test_a_float32_module_that_is_not_linear_loses_no_precision(layer: Any) -> None:
    found = audit(lambda: ((lambda x: gm.all_gather(layer(x))), torch.randn(3, 8)), kinds=FEW)
    assert found.ok, found
    assert "float64" in found.left_out["precision-lost"]


def test_a_bfloat16_function_that_is_not_linear_is_left_out() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).bfloat16()
    found = audit(lambda: ((lambda x: gm.all_gather(layer(x))), torch.randn(3, 4).bfloat16()), kinds=FEW)
    assert found.ok, found
    assert "bfloat16" in found.left_out["not-adjoint"]


@pytest.mark.parametrize(
    ("fn", "x"),
    [
        (lambda x: gm.all_gather(x.log()), torch.full((3,), 2e-4)),
        (lambda x: gm.all_gather((1000 * x).softmax(0)), torch.tensor([0.1, 0.1003, 0.0999])),
        (lambda x: gm.all_gather(x.square()), torch.zeros(3)),
        (lambda x: gm.all_gather(x.pow(3)), 1e5 * torch.arange(1.0, 4)),
    ],
)
def test_the_step_of_finite_differences_fits_the_function(fn: Any, x: Tensor) -> None:
    found = audit(lambda: (fn, x), kinds=FEW)
    assert found.ok, found
    assert not found.linear
    assert found.arrows


@pytest.mark.parametrize("fn", [lambda x: gm.all_gather(x.relu()), lambda x: gm.all_gather(x.abs())])
def test_a_function_without_derivative_is_not_checked(fn: Any) -> None:
    found = audit(lambda: (fn, torch.zeros(3)), kinds=FEW)
    assert found.ok, found
    assert "do not converge" in found.left_out["not-adjoint"]


SEVENFOLD = function(lambda ctx, x: x.clone(), lambda ctx, grad: 7 * grad)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: {"loss": SEVENFOLD.apply(x)},
        lambda x: (gm.all_gather(x), [SEVENFOLD.apply(x)]),
        lambda x: (y for y in [SEVENFOLD.apply(x), None]),
    ],
)
def test_results_in_structures_are_judged(fn: Any) -> None:
    assert "not-adjoint" in audit(lambda: (fn, torch.randn(3)), kinds=FEW).kinds


def test_operands_in_structures_are_judged() -> None:
    def fn(x: Tensor, more: dict[str, Any]) -> Tensor:
        assert more["name"] == "w"
        return gm.all_gather(x) + SEVENFOLD.apply(more["w"][0]).sum()

    inputs = torch.randn(2), {"name": "w", "w": [torch.randn(2)]}
    assert "not-adjoint" in audit(lambda: (fn, inputs), kinds=FEW).kinds


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda x: "abc", "no differentiable tensor"),
        (lambda x: (), "no differentiable tensor"),
        (lambda x: x if dist.get_rank() else None, "0 on rank 0, 1 on rank 1"),
        (lambda x: x + torch.randn_like(x), "different results for the same operands"),
    ],
)
def test_invalid_results_raise(fn: Any, text: str) -> None:
    with pytest.raises(gm.ArgumentError, match=text):
        audit(lambda: (fn, torch.randn(3)), kinds=FEW)


def test_arguments_of_the_wrong_type_raise() -> None:
    with pytest.raises(gm.ArgumentError, match="not callable"):
        audit((gm.all_gather, torch.randn(3)))  # type: ignore[arg-type]
    with pytest.raises(gm.ArgumentError, match="no differentiable tensor"):
        audit(lambda: (gm.all_gather, 3))
    assert audit(lambda: (gm.all_gather, torch.randn(3)), kinds="not-adjoint").ok


def test_module_parameters_passed_as_operands_raise() -> None:
    found = audit(lambda: (torch.nn.Linear(2, 2).double(), torch.randn(3, 2)), kinds=FEW)
    assert "pass them as inputs" in found.left_out["parameters"]


def test_function_that_writes_into_its_operand_raises() -> None:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    made = function(forward, lambda ctx, grad: summed(grad))
    assert "operand-overwritten" in audit(lambda: (made.apply, torch.randn(3)), kinds=FEW).kinds
    assert "operand-overwritten" in audit(lambda: ((lambda x: x.mul_(2)), torch.ones(3)), kinds=FEW).kinds


def test_four_operands_of_different_types_have_a_reading() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return gm.all_gather((x @ gm.replicate(w) + gm.replicate(b)) @ gm.replicate(v))

    inputs = torch.randn(2, 3), torch.randn(3, 2), torch.randn(2), torch.randn(2, 2)
    found = audit(lambda: (fn, inputs), kinds=FEW)
    assert found.ok, found
    assert any(arrow.startswith("V, I, I, I -> ") for arrow in found.arrows)


def test_more_types_than_can_be_tried_are_left_out() -> None:
    def fn(*xs: Tensor) -> Tensor:
        return gm.all_gather(xs[0]) + sum(gm.replicate(x).sum() for x in xs[1:])

    found = audit(lambda: (fn, [torch.randn(2) for _ in range(7)]), kinds=FEW)
    assert found.ok, found
    assert found.arrows or "too many" in found.left_out["not-adjoint"]


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same_name.py").write_text(f"def build(): return {folder!r}")
    (tmp_path / "random.py").write_text("def build(): return 'c'")
    files = [tmp_path / "a/same_name.py", tmp_path / "b/same_name.py", tmp_path / "random.py"]
    assert [named(f"{file}:build")() for file in files] == ["a", "b", "c"]
    assert named(f"{files[1]}:build") is named(f"{files[1]}:build")


def test_a_file_that_ends_the_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "it_quits.py").write_text("import sys; sys.exit(0)")
    with pytest.raises(gm.ArgumentError, match="SystemExit"):
        named(f"{tmp_path}/it_quits.py:build")


@pytest.mark.parametrize("backward_too", [False, True])
def test_a_function_that_ends_the_program_aborts(backward_too: bool) -> None:
    def leave(*_: Any) -> Any:
        raise SystemExit(3)

    made = function(lambda ctx, x: x.clone(), leave) if backward_too else function(leave, leave)
    assert audit(lambda: (made.apply, torch.ones(3)), kinds=FEW).kinds == ("aborts",)


def test_checkpoints_that_are_reentrant_are_audited() -> None:
    def fn(x: Tensor) -> Any:
        return checkpoint(lambda z: gm.all_gather(z).sin(), x, use_reentrant=True)

    found = audit(lambda: (fn, torch.randn(3)), kinds=FEW)
    assert found.ok, found
    assert found.arrows == ("V -> R",)


def test_equal_infinities_have_zero_distance() -> None:
    inf, nan = float("inf"), float("nan")
    assert distance(torch.tensor([-inf, nan, 1.0]), torch.tensor([-inf, nan, 1.0])) == 0
    assert distance(torch.tensor([-inf, 1.0]), torch.tensor([inf, 1.0])) == inf
    assert distance(torch.tensor([nan, 1.0]), torch.tensor([2.0, 1.0])) == inf
    mask = torch.tensor([True, False, False, True, False, False])
    found = audit(
        lambda: ((lambda x: gm.all_gather(x).masked_fill(mask, -inf)), torch.randn(3)),
        kinds=FEW,
        world_size=2,
    )
    assert found.ok, found
    assert found.arrows


def test_a_layer_that_has_to_finish_each_backward_is_left_out_where_it_cannot_be_asked() -> None:
    def build() -> Any:
        layer = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).double())
        return (lambda x: layer(x)), torch.randn(3, 2)

    found = audit(build, kinds=["global-convention", "second-order-raises", "not-adjoint"])
    assert found.ok, found
    assert found.arrows
    assert "global-convention" in found.left_out
