"""Verbs on tuples, lists and dicts of tensors: as one by one, in one message, and errors that name the tensor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from gradmesh._util.structure import leaves, rebuilt
from gradmesh.backends.threads.group import ThreadsGroup
from gradmesh.transport import TRANSPORTS
from gradmesh.transport.process_group import OwnGroupTransport

Threads = Callable[[int], Callable[..., list[Any]]]

VERBS: dict[str, Callable[[Any], Any]] = {
    "all_gather R": lambda x: gm.all_gather(x),
    "all_gather I, last dim": lambda x: gm.all_gather(x, dim=-1, dst=gm.I),
    "all_gather, sizes": lambda x: gm.all_gather(x, dim=-1, sizes="auto"),
    "all_reduce R": lambda x: gm.all_reduce(x, dst=gm.R),
    "all_reduce mean I": lambda x: gm.all_reduce(x, op="mean", dst=gm.I),
    "all_reduce max": lambda x: gm.all_reduce(x, op="max", dst=gm.R),
    "all_reduce logsumexp": lambda x: gm.all_reduce(x, op="logsumexp", dst=gm.R),
    "broadcast R": lambda x: gm.broadcast(x, root=1),
    "broadcast I": lambda x: gm.broadcast(x, dst=gm.I),
    "permute": lambda x: gm.permute(x, pairs=[(0, 2), (2, 1)]),
    "permute, sizes": lambda x: gm.permute(x, pairs=[(0, 2), (2, 1)], dim=-1, sizes="auto"),
    "replicate": lambda x: gm.replicate(x),
    "shift": lambda x: gm.shift(x, offset=-1),
    "shift, open": lambda x: gm.shift(x, wrap=False),
    "shift, rounded": lambda x: gm.shift(x, comm_dtype=torch.float16, backward_dtype=torch.bfloat16),
}


def operands(seed: int) -> dict[str, Any]:
    """A structure with two dtypes, a scalar unless dims are needed, an empty tensor, odd strides."""
    generator = torch.Generator().manual_seed(10 * seed + gm.rank())

    def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, dtype=dtype, generator=generator)

    return {
        "k": random(2, 3),
        "v": (random(3, 2).T, [random(4), random(2, 0)]),
        "single": random(5, dtype=torch.float32),
        "last": random(1, 2, 2),
    }


def tensors(x: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(x, "test", "")]


def loss_of(y: list[Tensor], seed: int) -> Tensor:
    """A loss that differs from rank to rank and uses every element otherwise."""
    generator = torch.Generator().manual_seed(1000 + 10 * seed + gm.rank())
    return sum(
        ((torch.randn(t.shape, dtype=torch.float64, generator=generator) * t.sin()).sum() for t in y),
        torch.zeros((), dtype=torch.float64),
    )


def derivatives(x: dict[str, Any], call: Callable[[Any], list[Tensor]]) -> list[Tensor]:
    """The results, and the gradients of first and second order."""
    inputs = [t.detach().clone().requires_grad_() for t in tensors(x)]
    y = call(rebuilt(x, iter(inputs)))
    first = torch.autograd.grad(loss_of(y, 1), inputs, create_graph=True)
    second = torch.autograd.grad(loss_of(list(first), 2), inputs)
    return [*y, *first, *second]


@pytest.mark.parametrize("name", VERBS)
def test_structure_equals_its_tensors_one_by_one(name: str, threads: Threads) -> None:
    verb = VERBS[name]

    def on_each_rank() -> None:
        x = operands(1)
        together = derivatives(x, lambda s: tensors(verb(s)))
        alone = derivatives(x, lambda s: [verb(t) for t in tensors(s)])
        for got, want in zip(together, alone, strict=True):
            # Where an element stands may decide in which order a backend adds its terms.
            torch.testing.assert_close(
                got, want, rtol=1e-6 if want.dtype is torch.float32 else 1e-13, atol=1e-13
            )

    threads(3)(on_each_rank)


@pytest.mark.parametrize(
    "name", ["all_gather R", "all_reduce R", "broadcast I", "permute", "replicate", "shift"]
)
def test_forward_mode_and_vmap_go_through_a_structure(name: str, threads: Threads) -> None:
    verb = VERBS[name]

    def on_each_rank() -> None:
        k, v = (torch.randn(2, 3, generator=torch.Generator().manual_seed(gm.rank() + s)) for s in (0, 10))

        def of(k: Tensor, v: Tensor) -> Tensor:
            a, b = verb((k, v))
            return a.sin() * b

        def alone(k: Tensor, v: Tensor) -> Tensor:
            return verb(k).sin() * verb(v)

        got, want = (torch.func.jvp(f, (k, v), (v, k)) for f in (of, alone))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.func.vmap(of)(k, v), torch.func.vmap(alone)(k, v))

    threads(3)(on_each_rank)


class Counting(OwnGroupTransport):
    """Counts what it carries."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        COUNTED.append(self.axis.rank)


COUNTED: list[int] = []


@pytest.mark.parametrize(
    "name",
    ["all_gather R", "all_reduce R", "all_reduce mean I", "broadcast R", "broadcast I", "permute", "shift"],
)
def test_the_tensors_of_a_dtype_are_one_message(
    name: str, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRANSPORTS, ThreadsGroup, Counting)
    verb = VERBS[name]

    def on_each_rank() -> list[int]:
        def messages(call: Callable[[], object]) -> int:
            before = COUNTED.count(gm.rank())
            call()
            return COUNTED.count(gm.rank()) - before

        one = torch.randn(3, requires_grad=True)
        many = [torch.randn(3, 2, requires_grad=True) for _ in range(5)]
        mixed = [*many, torch.randn(2, dtype=torch.float64, requires_grad=True)]
        outs = []
        counts = [messages(lambda x=x: outs.append(verb(x))) for x in (one, many, mixed)]
        backward = [messages(lambda out=out: loss_of(tensors(out), 3).backward()) for out in outs]
        return [*counts, *backward]

    for one, many, mixed, *back in threads(3)(on_each_rank):
        assert (many, mixed) == (one, 2 * one)
        assert back == [back[0], back[0], 2 * back[0]]


class Pair(NamedTuple):
    k: Tensor
    v: Tensor


def test_the_result_has_the_same_structure(threads: Threads) -> None:
    def on_each_rank() -> None:
        x = torch.ones(2)
        made = gm.replicate(Pair(x, x))
        assert isinstance(made, Pair)
        assert type(gm.replicate((x,))) is tuple
        assert type(gm.replicate([x])) is list
        x_and_nothing: dict[object, Any] = {"a": [x, (x,)], 1: {}}
        nested = gm.shift(x_and_nothing)
        assert (list(nested), type(nested["a"]), nested[1]) == (["a", 1], list, {})
        assert gm.all_gather(()) == ()
        assert list(gm.all_reduce(OrderedDict(z=x, a=x), dst=gm.R)) == ["z", "a"]
        assert gm.all_gather((torch.tensor(1.0),))[0].shape == (2,)

    threads(2)(on_each_rank)


def test_results_can_be_written_and_operands_are_only_read(threads: Threads) -> None:
    def on_each_rank() -> None:
        x = (torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True))
        for verb in VERBS.values():
            first, second = verb(x)
            first.mul_(2)
            before = second.detach().clone()
            first.zero_()
            assert torch.equal(second, before)
        assert all(torch.equal(t, torch.ones_like(t)) for t in x)

    threads(3)(on_each_rank)


WRONG: dict[str, tuple[type[gm.GradmeshError], str, Callable[[], object]]] = {
    "no tensor": (
        gm.ArgumentError,
        r"got       x\['k'\]\[1\] of type float",
        lambda: gm.shift({"k": [torch.ones(1), 1.0]}),  # type: ignore[type-var]
    ),
    "dim": (
        gm.ArgumentError,
        r"dim is out of range(.|\n)*operand   x\[1\]",
        lambda: gm.all_gather((torch.ones(1, 1), torch.ones(1)), dim=1),
    ),
    "dtype": (
        gm.DTypeError,
        r"(?m)operand   x\['n'\]$",
        lambda: gm.all_reduce({"x": torch.ones(1), "n": torch.arange(2)}, op="mean", dst=gm.R),
    ),
    "sparse": (
        gm.ArgumentError,
        r"must be a dense tensor(.|\n)*operand   x\[1\]",
        lambda: gm.replicate([torch.ones(2), torch.ones(2).to_sparse()]),
    ),
    "sizes": (
        gm.ShapeError,
        r"operand   x\[0\]",
        lambda: gm.shift([torch.ones(3), torch.ones(2)], sizes=[2, 2]),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_error_names_the_tensor_that_is_wrong(case: str, threads: Threads) -> None:
    kind, text, call = WRONG[case]

    def on_each_rank() -> None:
        with pytest.raises(kind, match=text):
            call()

    threads(2)(on_each_rank)


MISFITS: dict[str, Callable[[int, Tensor, Tensor], Any]] = {
    "other cuts of as many elements": lambda r, a, b: (a, b) if r else (b, a),
    "keys in another order": lambda r, a, b: {"k": a, "v": a} if r else {"v": a, "k": a},
}


@pytest.mark.parametrize("case", MISFITS)
def test_mismatched_structures_raise_on_every_rank(case: str, threads: Threads) -> None:
    def on_each_rank() -> str:
        with pytest.raises(gm.MismatchError) as caught:
            gm.all_reduce(MISFITS[case](gm.rank(), torch.ones(2), torch.ones(3)), dst=gm.R)
        assert gm.all_gather(torch.tensor([gm.rank()])).tolist() == [0, 1]
        return str(caught.value)

    for text in threads(2)(on_each_rank):
        assert "rank 1: all_reduce(dst=gm.R) of float32[" in text
        assert "made of x[" in text


def test_a_structure_is_a_link_of_a_chain(threads: Threads) -> None:
    def on_each_rank() -> list[float]:
        k, v = (torch.tensor([1.0 + gm.rank() + s], requires_grad=True) for s in (0, 5))
        with gm.ordered():
            a, b = gm.all_gather((k, v))
            gm.backward((a * b).sum() if gm.rank() == 0 else None)
        assert k.grad is not None
        assert v.grad is not None
        return [k.grad.item(), v.grad.item()]

    assert threads(2)(on_each_rank) == [[6.0, 1.0], [7.0, 2.0]]
