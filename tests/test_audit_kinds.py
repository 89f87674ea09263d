"""Every kind of finding: a wrong program of a few lines has it, and the right one beside it has none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from gradmesh.verify import Audit
from gradmesh.verify.auditing.findings import KINDS

W = 2


def audit(build: Any, **options: Any) -> Audit:
    """On threads alone, for two ranks."""
    return gm.verify.audit(build, **{"world_size": W, "gloo": False, **options})


def function(forward: Callable[..., Any], backward: Callable[..., Any], **more: Any) -> Any:
    """An autograd Function of these two."""
    return type(
        "Own",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward), **more},
    )


def gathered(x: Tensor, group: Any = None) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def summed(x: Tensor, group: Any = None) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def own(x: Tensor, group: Any = None) -> Tensor:
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)]


class Gather(torch.autograd.Function):
    """Right in first order, and differentiable in none beyond."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gathered(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return own(summed(grad)).clone()


EXPECTED_OF_HAND_WRITTEN = {"second-order-raises", "forward-mode-missing", "unused-output"}
"""What any Function has that calls raw collectives in backward and says so."""


def asked(fn: Any, *inputs: Tensor, **options: Any) -> Audit:
    return audit(lambda: (fn, inputs or torch.randn(4, 3)), **options)


def kinds(fn: Any, *inputs: Tensor, **options: Any) -> set[str]:
    return set(asked(fn, *inputs, **options).kinds) - EXPECTED_OF_HAND_WRITTEN


def test_careful_manual_function_has_only_findings_on_missing_features() -> None:
    found = asked(Gather.apply)
    assert set(found.kinds) == EXPECTED_OF_HAND_WRITTEN
    assert found.arrows == ("V -> R",)
    assert found.name == "Gather"


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (W, "W = 2 times too large"),
        (1 / W, "too small by W = 2"),
        (3, "3 times too large"),
        (-1, "-1 times the correct one"),
    ],
)
def test_a_factor_of_the_gradient_is_named(scale: float, text: str) -> None:
    fn = function(lambda ctx, x: gathered(x), lambda ctx, g: scale * own(summed(g)))
    found = next(f for f in asked(fn.apply).findings if f.kind == "not-adjoint")
    assert text in found.text
    assert found.severity == "error"
    assert __file__ in str(found.line)


def test_another_ranks_slice_is_not_the_adjoint_nor_a_multiple_of_it() -> None:
    fn = function(lambda ctx, x: gathered(x), lambda ctx, g: summed(g).chunk(W)[1 - dist.get_rank()].clone())
    found = next(f for f in asked(fn.apply).findings if f.kind == "not-adjoint")
    assert "not a multiple" in found.text


def test_a_missing_gradient_is_reported() -> None:
    found = asked(lambda x: x.new_zeros(3) + summed(x.detach()).sum(), kinds=["not-adjoint"])
    assert "no gradient on any rank" in found.findings[0].text


def test_sum_with_scaled_gradient_is_not_an_adjoint_of_a_multiple() -> None:
    """Of equal operands a sum is W times one, whose adjoint that would be."""
    assert "not-adjoint" in kinds(function(lambda ctx, x: summed(x), lambda ctx, g: W * g).apply)
    assert "not-adjoint" not in kinds(function(lambda ctx, x: summed(x), lambda ctx, g: g.clone()).apply)


def _backward_in_place(ctx: Any, g: Tensor) -> Tensor:
    dist.all_reduce(g)
    return own(g).clone()


def test_gradient_overwritten() -> None:
    fn = function(lambda ctx, x: gathered(x), _backward_in_place)
    found = next(f for f in asked(fn.apply).findings if f.kind == "gradient-overwritten")
    line = _backward_in_place.__code__.co_firstlineno
    assert found.line == f"{__file__}:{line}"
    assert found.ranks == (0, 1)


def test_a_gradient_is_seen_to_be_overwritten_inside_of_a_larger_function() -> None:
    fn = function(lambda ctx, x: gathered(x), _backward_in_place)
    assert "gradient-overwritten" in kinds(lambda x: 3 * fn.apply(2 * x))


def _in_place(ctx: Any, x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x.clone()


def test_operand_overwritten() -> None:
    assert "operand-overwritten" in kinds(function(_in_place, lambda ctx, g: g.clone()).apply)


def test_result_aliases_operand() -> None:
    fn = function(lambda ctx, x: x, lambda ctx, g: summed(g))
    assert "result-aliases-operand" in kinds(fn.apply)
    assert kinds(lambda x: x.reshape(-1)) == set()  # autograd knows of a view


def _throws_the_copy_away(ctx: Any, x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x.contiguous())
    return x


def _asks_for_contiguous(ctx: Any, g: Tensor) -> Tensor:
    return summed(g.view(-1).view(g.shape))


def _throws_its_copy_away(ctx: Any, g: Tensor) -> Tensor:
    g = g.detach()
    dist.all_reduce(g.contiguous())
    return g.clone()


def test_strided_operand_wrong_and_raises() -> None:
    fn = function(_throws_the_copy_away, lambda ctx, g: g.clone())
    strided = next(f for f in asked(fn.apply).findings if f.kind == "strided-operand")
    assert "silently" in strided.text
    fn = function(lambda ctx, x: summed(x.view(-1)).view(x.shape), lambda ctx, g: g.clone())
    strided = next(f for f in asked(fn.apply).findings if f.kind == "strided-operand")
    assert "raises" in strided.text


def test_strided_gradient_wrong_and_raises() -> None:
    fn = function(lambda ctx, x: x.clone(), _throws_its_copy_away)
    strided = next(f for f in asked(fn.apply).findings if f.kind == "strided-gradient")
    assert "silently" in strided.text
    fn = function(lambda ctx, x: x.clone(), _asks_for_contiguous)
    strided = next(f for f in asked(fn.apply).findings if f.kind == "strided-gradient")
    assert "raises" in strided.text
    assert f"{__file__}:{_asks_for_contiguous.__code__.co_firstlineno + 1}" == strided.line


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16, torch.float16])
def test_precision_lost_in_forward_and_in_backward(narrow: torch.dtype) -> None:
    forward = function(lambda ctx, x: summed(x.to(narrow)).to(x.dtype), lambda ctx, g: g.clone())
    backward = function(lambda ctx, x: x.clone(), lambda ctx, g: summed(g.to(narrow)).to(g.dtype))
    for fn, where in ((forward, "forward"), (backward, "backward")):
        found = asked(
            fn.apply, kinds=["not-adjoint", "strided-operand", "strided-gradient", "precision-lost"]
        )
        assert found.kinds == ("precision-lost",)
        assert found.arrows
        assert where in found.findings[0].text


def test_gradient_uninitialised() -> None:
    def backward(ctx: Any, g: Tensor) -> Tensor:
        out = torch.empty_like(g)
        out[1:] = summed(g)[1:]
        return out

    found = asked(function(lambda ctx, x: x.clone(), backward).apply)
    assert "gradient-uninitialised" in found.kinds
    before = torch.are_deterministic_algorithms_enabled()
    assert before is False


def _saves(ctx: Any, x: Tensor) -> Tensor:
    ctx.weight = torch.full_like(x, 2.0)
    return x * ctx.weight


def _scales_what_it_saved(ctx: Any, g: Tensor) -> Tensor:
    out = g * ctx.weight
    ctx.weight.mul_(3)
    return out


def test_saved_buffer_overwritten() -> None:
    assert "saved-buffer-overwritten" in kinds(function(_saves, _scales_what_it_saved).apply)


def test_second_order_lost_wrong_and_raises() -> None:
    lost = function(lambda ctx, x: gathered(x), lambda ctx, g: own(summed(g.detach())).clone())
    assert "second-order-lost" in asked(lost.apply).kinds
    wrong = function(lambda ctx, x: gathered(x), lambda ctx, g: own(summed(g)).clone())
    assert "second-order-wrong" in asked(wrong.apply).kinds
    assert "second-order-raises" in asked(Gather.apply).kinds
    twice = function(lambda ctx, x: summed(x), lambda ctx, g: gm.all_reduce(g, dst=gm.R))
    assert not [kind for kind in asked(twice.apply).kinds if kind.startswith("second")]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def test_forward_mode_missing_and_wrong() -> None:
    assert "forward-mode-missing" in asked(Gather.apply).kinds
    right = function(
        lambda ctx, x: summed(x), lambda ctx, g: g.clone(), jvp=staticmethod(lambda ctx, t: summed(t))
    )
    wrong = function(
        lambda ctx, x: summed(x), lambda ctx, g: g.clone(), jvp=staticmethod(lambda ctx, t: t.clone())
    )
    assert not [kind for kind in asked(right.apply).kinds if kind.startswith("forward")]
    assert "forward-mode-wrong" in asked(wrong.apply).kinds


def test_vmap_wrong() -> None:
    def rule(info: Any, in_dims: Any, x: Tensor) -> Any:
        return fn.apply(x), 0

    fn = function(
        lambda x: gathered(x),
        lambda ctx, g: own(summed(g)).clone(),
        setup_context=staticmethod(_setup),
        vmap=staticmethod(rule),
    )
    assert "vmap-wrong" in asked(fn.apply).kinds


def test_complex_wrong() -> None:
    conjugates = function(lambda ctx, x: summed(x), lambda ctx, g: g.conj().resolve_conj().clone())
    drops = function(lambda ctx, x: summed(x.real if x.is_complex() else x), lambda ctx, g: g.clone())
    assert "conjugate" in next(f for f in asked(conjugates.apply).findings if f.kind == "complex-wrong").text
    assert "imaginary" in next(f for f in asked(drops.apply).findings if f.kind == "complex-wrong").text
    given = torch.randn(3, dtype=torch.complex64)
    assert "not-adjoint" in kinds(conjugates.apply, given)


def ragged(parts: Any, scale: bool = False, blind: bool = False) -> Any:
    """A gather of uneven parts, or what is made of one."""
    rank = dist.get_rank()
    sizes = list(parts or [2] * W)

    def forward(ctx: Any, x: Tensor) -> Tensor:
        longest = max(sizes)
        padded = torch.cat([x, x.new_zeros(longest - len(x), 3)])
        out = gathered(padded).split(longest)
        return torch.cat([part[:size] for part, size in zip(out, sizes, strict=True)])

    def backward(ctx: Any, g: Tensor) -> Tensor:
        if blind:
            return (
                g.chunk(W)[rank].clone() if len(g.chunk(W)[rank]) == sizes[rank] else g[: sizes[rank]].clone()
            )
        grad = summed(g).split(sizes)[rank]
        return grad * W * sizes[rank] / sum(sizes) if scale else grad.clone()

    return function(forward, backward).apply, torch.randn(sizes[rank], 3)


def test_uneven_parts_and_empty_ones() -> None:
    right = audit(lambda parts=None: ragged(parts))
    assert set(right.kinds) == {"second-order-wrong", "forward-mode-missing", "unused-output"}
    scaled = audit(lambda parts=None: ragged(parts, scale=True))
    found = next(f for f in scaled.findings if f.kind == "uneven-parts")
    assert "W times the rank's share" in found.text
    assert "uneven-parts" in audit(lambda parts=None: ragged(parts, blind=True)).kinds

    def refuses_empty(parts: Any = None) -> Any:
        fn, x = ragged(parts)
        return (lambda x: fn(x) * (1 if len(x) else 1 / len(x))), x

    found_kinds = audit(refuses_empty).kinds
    assert "empty-part" in found_kinds
    assert "uneven-parts" not in found_kinds


def test_parts_that_the_check_of_a_verb_refuses_on_every_rank_are_no_finding() -> None:
    def build(parts: Any = None, gather: Any = gm.all_gather) -> Any:
        return gather, torch.randn((parts or [2] * W)[dist.get_rank()], 3)

    found = audit(build)
    assert found.ok
    assert not found.findings
    for kind in ("uneven-parts", "empty-part"):
        assert "on every rank: forward raises: MismatchError: gradmesh.all_gather" in found.left_out[kind]
    assert {"uneven-parts", "empty-part"} <= set(audit(lambda parts=None: build(parts, gathered)).kinds)

    def alone(x: Tensor) -> Tensor:  # the backend refuses it, in the middle of a call
        return gm.all_gather(x) if len(x) == 2 else gathered(x)

    assert "uneven-parts" in audit(lambda parts=None: build(parts, alone)).kinds

    def centred(x: Tensor) -> Tensor:  # a rank without rows skips a collective
        x = x - gm.all_reduce(x.sum(0), dst=gm.R) if len(x) else x
        return gm.all_gather(x, sizes="auto")

    assert "empty-part" in audit(lambda parts=None: build(parts, centred)).kinds

    def slices(parts: Any = None) -> Any:  # its backward takes all parts to be equal
        sizes = list(parts or [2] * W)
        first = sum(sizes[: dist.get_rank()])
        fn = function(
            lambda ctx, x: x[first : first + sizes[dist.get_rank()]].clone(),
            lambda ctx, g: gm.all_gather(g, dst=gm.I),
        )
        return fn.apply, torch.randn(sum(sizes), 3)

    assert {"uneven-parts", "empty-part"} <= set(audit(slices).kinds)


def test_kinds_whose_keyword_build_does_not_accept_are_left_out() -> None:
    found = asked(Gather.apply)
    assert {"uneven-parts", "empty-part", "own-rank-assumed"} <= set(found.left_out)


def test_unused_output_of_a_verb_is_safe_inside_ordered_and_of_a_raw_call_is_not() -> None:
    found = next(f for f in asked(Gather.apply).findings if f.kind == "unused-output")
    assert "waits" in found.text
    assert asked(gm.all_gather).ok


def test_own_rank_assumed() -> None:
    def build(group: Any = None, by: Any = dist.get_rank) -> Any:
        world = dist.get_world_size(group)

        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x, group)

        def backward(ctx: Any, g: Tensor) -> Tensor:
            return summed(g, group).chunk(world)[by(group) % world].clone()

        return function(forward, backward).apply, torch.randn(2, 3)

    assert "own-rank-assumed" not in audit(build).kinds
    assert "own-rank-assumed" in audit(lambda group=None: build(group, lambda _: dist.get_rank())).kinds


def test_unused_group_is_reported_as_own_rank_assumed() -> None:
    found = audit(lambda group=None: (Gather.apply, torch.randn(2)))
    assert "own-rank-assumed" in found.kinds


def test_the_rank_on_the_machine_is_not_the_rank() -> None:
    def build(local_rank: int = 0) -> Any:
        fn = function(lambda ctx, x: gathered(x), lambda ctx, g: summed(g).chunk(W)[local_rank].clone())
        return fn.apply, torch.randn(2)

    found = audit(build)
    assert found.arrows == ("V -> R",)
    assert "own-rank-assumed" in found.kinds


class _Settings:
    convention = "sum"


CHOICES = {"mean": False}
SUMS = True
LEVEL = 1


def set_sums(to: bool, level: int) -> None:
    global SUMS, LEVEL
    SUMS, LEVEL = to, level


def _by_global(ctx: Any, g: Tensor) -> Tensor:
    return summed(g) if SUMS else g.clone()


def _by_dict(ctx: Any, g: Tensor) -> Tensor:
    return summed(g) / (W if CHOICES["mean"] else 1)


def _by_attribute(ctx: Any, g: Tensor) -> Tensor:
    return g.clone() if _Settings.convention == "own" else summed(g)


def _by_number(ctx: Any, g: Tensor) -> Tensor:
    """documented"""
    return g.clone() if LEVEL == 2 else summed(g)


@pytest.mark.parametrize("backward", [_by_global, _by_dict, _by_attribute, _by_number])
def test_global_convention(backward: Any) -> None:
    found = next(
        f
        for f in asked(function(lambda ctx, x: x.clone(), backward).apply).findings
        if f.kind == "global-convention"
    )
    assert "after forward" in found.text
    assert (SUMS, LEVEL, CHOICES, _Settings.convention) == (True, 1, {"mean": False}, "sum")


def _decides(ctx: Any, x: Tensor) -> Tensor:
    ctx.sums = SUMS
    return x.clone()


def test_a_convention_that_forward_decides_is_none_of_the_programs() -> None:
    fn = function(_decides, lambda ctx, g: summed(g) if ctx.sums else g.clone())
    assert "global-convention" not in asked(fn.apply).kinds


def test_a_convention_that_build_can_change() -> None:
    @contextlib.contextmanager
    def other() -> Iterator[None]:
        state.append(1)
        yield
        state.clear()

    state: list[int] = []
    fn = function(lambda ctx, x: x.clone(), lambda ctx, g: g.clone() if state else summed(g))
    assert "global-convention" in audit(lambda: (fn.apply, torch.randn(3), other)).kinds


def test_backward_that_raises_on_a_plain_gradient() -> None:
    assert "backward-raises" in asked(function(lambda ctx, x: summed(x), lambda ctx, g: (g, g)).apply).kinds


def test_a_function_that_waits_for_ever_hangs() -> None:
    def forward(x: Tensor) -> Tensor:
        return summed(x) if dist.get_rank() == 0 else x

    found = asked(forward)
    assert found.kinds == ("hangs",)
    assert found.arrows == ()


def test_every_kind_has_a_severity_and_words() -> None:
    for kind in KINDS.values():
        assert kind.severity in ("error", "warning", "note")
        assert kind.means
        assert kind.remedy
