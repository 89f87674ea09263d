"""Compiled programs: the order of their collectives, `ordered()`, derivatives inside of them, and other tracers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import gradmesh as gm
from tests.seldom import seldom

Processes = Callable[[int], Callable[..., list[Any]]]
Loss = Callable[[Tensor, int], Tensor]

PROGRAMS: dict[str, Loss] = {
    "a gather, which is empty on one rank": lambda x, _: (
        (gm.all_gather(x.sin()) ** 2).sum() + (gm.gather(x * x) ** 2).sum()
    ),
    "a scan": lambda x, _: (gm.all_gather(x.sin()) ** 2).sum() + gm.scan(x * x).sum(),
    "a permutation": lambda x, _: (
        (gm.all_reduce(x.sin(), dst=gm.R) ** 2).sum() + (gm.permute(x * x, pairs=[(0, 1)]) ** 2).sum()
    ),
    "other work on each rank": lambda x, rank: _with_other_work(x, rank),
}


def _with_other_work(x: Tensor, rank: int) -> Tensor:
    z = (x[:, None] * x).sum(1) * 0.1 if rank == 0 else x
    a, b = gm.all_gather(z.sin()), gm.all_gather(z**3)
    return (a**2).sum() + (b.sort().values.diff().exp().sum() if rank == 0 else (b**2).sum())


def _operand(rank: int) -> Tensor:
    return torch.linspace(0.1, 0.9, 4, dtype=torch.float64) + 0.137 * rank


def ordered_by(backend: str) -> dict[str, bool]:
    """Whether value and gradient are those of eager mode, forward alone and with backward."""
    rank, right = gm.rank(), {}
    for name, program in PROGRAMS.items():
        torch._dynamo.reset()
        compiled = torch.compile(program, fullgraph=True, backend=backend)
        x, y = (_operand(rank).requires_grad_() for _ in range(2))
        with torch.no_grad():
            alone = compiled(x.detach(), rank)
        compiled(x, rank).backward()
        with gm.ordered():
            expected = program(y, rank)
            gm.backward(expected)
        assert x.grad is not None
        assert y.grad is not None
        right[name] = torch.allclose(alone, expected) and torch.allclose(x.grad, y.grad)
    return right


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_collectives_keep_their_order_where_the_ranks_programs_differ(
    backend: str, compiling: Processes
) -> None:
    assert compiling(2)(ordered_by, backend) == [dict.fromkeys(PROGRAMS, True)] * 2


def _of_one_output(x: Tensor, rank: int) -> Tensor:
    a, b, c = gm.all_gather(x.sin()), gm.all_gather(x**3), gm.scan(2 * x)
    return (a**3).sum() if rank == 0 else (b**2).sum() + (c**2).sum()


def _joined_inside(x: Tensor, rank: int) -> Tensor:
    with gm.ordered():
        return gm.join(_of_one_output(x, rank))


def in_a_chain(backend: str) -> list[bool]:
    """Whether gradients are right where each rank uses other outputs, the block around a compiled function or in it."""
    rank = gm.rank()
    x, y, z = (_operand(rank).requires_grad_() for _ in range(3))
    with gm.ordered():
        gm.backward(_of_one_output(x, rank))
    torch._dynamo.reset()
    compiled = torch.compile(_of_one_output, fullgraph=True, backend=backend)
    for _ in range(2):
        y.grad = None
        with gm.ordered():
            # An eager collective before and after the compiled ones, on the same chain.
            before = gm.shift(y)
            gm.backward(compiled(y, rank) + 0 * gm.exscan(before).sum())
    torch.compile(_joined_inside, fullgraph=True, backend=backend)(z, rank).backward()
    assert x.grad is not None
    return [t.grad is not None and torch.allclose(t.grad, x.grad) for t in (y, z)]


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_chain_runs_every_backward_of_a_compiled_function(backend: str, compiling: Processes) -> None:
    assert compiling(2)(in_a_chain, backend) == [[True, True]] * 2


def different_calls() -> str:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: gm.all_gather(x) if gm.rank() else gm.all_gather(x, dim=1),
        fullgraph=True,
        backend="aot_eager",
    )
    with pytest.raises(gm.MismatchError) as caught:
        compiled(torch.ones(2, 2))
    return str(caught.value)


@pytest.mark.processes
def test_compiled_calls_that_do_not_fit_together_are_refused_on_every_rank(compiling: Processes) -> None:
    for text in compiling(2)(different_calls):
        assert "all_gather(dim=0" in text
        assert "all_gather(dim=1" in text


ROUTES: dict[str, Callable[[Tensor], Tensor]] = {
    "all_gather": gm.all_gather,
    "all_gather to I": lambda x: gm.all_gather(x, dst=gm.I),
    "all_reduce": lambda x: gm.all_reduce(x, dst=gm.R),
    "all_reduce to I": lambda x: gm.all_reduce(x, dst=gm.I),
    "replicate": gm.replicate,
    "reduce_scatter": gm.reduce_scatter,
    "all_to_all": gm.all_to_all,
    "shift": gm.shift,
    "scan": gm.scan,
    "broadcast": gm.broadcast,
    "halo_exchange": gm.halo_exchange,
}


def force(verb: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def taken(x: Tensor, w: Tensor) -> Tensor:
        return torch.func.grad(lambda x: (verb(x * w) ** 3).sum())(x)

    return taken


def differ_inside(reorderable: bool) -> list[str]:
    """The verbs whose second derivative, or whose batch, is another one in a compiled function."""
    rank, wrong = gm.rank(), []
    for name, verb in ROUTES.items():
        torch._dynamo.reset()
        with gm.reorderable() if reorderable else contextlib.nullcontext():
            grads = []
            for take in (force(verb), torch.compile(force(verb), fullgraph=True, backend="aot_eager")):
                w = _operand(rank).requires_grad_()
                (grad,) = torch.autograd.grad((take(_operand(rank) + 1, w) ** 2).sum(), w)
                grads.append(grad)
            batch = torch.stack([_operand(rank), _operand(rank) ** 2, -_operand(rank)])
            mapped = torch.func.vmap(verb)
            compiled = torch.compile(mapped, fullgraph=True, backend="aot_eager")
            if not torch.allclose(grads[0], grads[1]) or not torch.equal(mapped(batch), compiled(batch)):
                wrong.append(name)
    return wrong


@pytest.mark.processes
@pytest.mark.parametrize("reorderable", seldom([False, True], [False]))
def test_second_derivatives_and_batches_inside_a_compiled_function_are_those_outside(
    reorderable: bool, compiling: Processes
) -> None:
    assert compiling(2)(differ_inside, reorderable) == [[], []]


def _linearized(verb: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.func.linearize(verb, x)[1](v), torch.func.jvp(verb, (x,), (v,))[1]


def _with_gradient(verb: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return torch.func.grad(lambda x: (verb(x) ** 2).sum())


TRACERS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "linearize": _linearized,
    "make_fx": lambda verb, x, v: (make_fx(verb)(x)(v), verb(v)),
    "make_fx, symbolic": lambda verb, x, v: (make_fx(verb, tracing_mode="symbolic")(x)(v), verb(v)),
    "make_fx of a gradient": lambda verb, x, v: (
        make_fx(_with_gradient(verb))(x)(v),
        _with_gradient(verb)(v),
    ),
    "jit.trace": lambda verb, x, v: (torch.jit.trace(verb, x, check_trace=False)(v), verb(v)),
}


def _around(verb: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: verb(x.sin()) * 2


def constant(how: str) -> list[str]:
    """The verbs whose traced program does not run the collective again."""
    rank, wrong = gm.rank(), []
    x, v = _operand(rank), _operand(rank) ** 2 + 1
    for name, verb in ROUTES.items():
        got, expected = TRACERS[how](_around(verb), x, v)
        if not torch.allclose(got, expected):
            wrong.append(name)
    return wrong


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")  # tracers warn of themselves
@pytest.mark.parametrize("how", TRACERS)
def test_traced_program_runs_the_collective_again(how: str, compiling: Processes) -> None:
    assert compiling(2)(constant, how) == [[], []]


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "all_gather": lambda x: gm.all_gather(x.sin()),
    "replicate": lambda x: gm.replicate(x.sin()),
}


def results_of_two_functions(name: str, backend: str, inside: bool) -> object:
    """Each rank's loss uses the result of another compiled function."""
    rank, x = gm.rank(), _operand(gm.rank()).requires_grad_()
    torch._dynamo.reset()
    one, other = (torch.compile(BETWEEN[name], fullgraph=True, backend=backend) for _ in range(2))
    try:
        with gm.ordered() if inside else contextlib.nullcontext():
            results = one(x), other(x * x)
            loss = (results[rank] ** 3).sum()
            if inside:
                gm.backward(loss)
            else:
                loss.backward()
                gm.all_gather(torch.zeros(1))
    except gm.MismatchError as error:
        return str(error)
    assert x.grad is not None
    return x.grad.tolist()


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BETWEEN)
def test_backward_calls_of_two_compiled_functions_are_not_taken_for_each_other(
    name: str, backend: str, compiling: Processes
) -> None:
    for text in compiling(2)(results_of_two_functions, name, backend, False):
        assert isinstance(text, str), "a gradient came where the ranks' backward calls do not fit"
        assert "the backward of call" in text


def outputs_of_one_function(backend: str) -> tuple[list[float], list[float]]:
    rank, x, y = gm.rank(), _operand(gm.rank()).requires_grad_(), _operand(gm.rank()).requires_grad_()
    torch._dynamo.reset()

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return gm.all_gather(x.sin()), gm.all_gather(x**3)

    (torch.compile(both, fullgraph=True, backend=backend)(x)[rank] ** 3).sum().backward()
    with gm.ordered():
        gm.backward((both(y)[rank] ** 3).sum())
    assert x.grad is not None
    assert y.grad is not None
    return x.grad.tolist(), y.grad.tolist()


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_outputs_of_one_compiled_function_may_be_used_differently(backend: str, compiling: Processes) -> None:
    for compiled, eager in compiling(2)(outputs_of_one_function, backend):
        assert compiled == pytest.approx(eager, rel=1e-12)


def broadcast_of_a_root_that_alone_requires_grad(dst: Literal[gm.Type.R, gm.Type.I]) -> tuple[object, object]:
    rank, found = gm.rank(), []
    torch._dynamo.reset()

    def program(x: Tensor) -> Tensor:
        return gm.broadcast(x, dst=dst).sin() * (1 if dst is gm.I else 1 + gm.rank())

    for run in (program, torch.compile(program, fullgraph=True, backend="aot_eager")):
        x = _operand(rank).requires_grad_(rank == 0)
        run(x).sum().backward()
        found.append(None if x.grad is None else x.grad.tolist())
    return found[0], found[1]


@pytest.mark.processes
@pytest.mark.parametrize("dst", [gm.R, gm.I])
def test_where_only_the_roots_operand_counts_the_others_take_part_in_its_backward(
    dst: gm.Type, compiling: Processes
) -> None:
    root, other = compiling(2)(broadcast_of_a_root_that_alone_requires_grad, dst)
    assert root[0] is not None
    assert root[1] == root[0]
    assert other == (None, None)
