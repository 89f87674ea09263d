"""Wrong calls of the verbs, each with the right call that the other ranks make when one rank alone is wrong."""

from __future__ import annotations

# What is called wrongly here is called so on purpose; test_typing.py shows what type checkers say.
# mypy: disable-error-code="arg-type, call-overload, list-item, type-var, dict-item, operator"
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

import gradmesh as gm

__all__ = ["CASES", "Case", "outcomes"]

ones = torch.ones
Work = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A wrong call.

    Attributes:
        kind: the error that it is.
        verb: the verb that the error names.
        wrong: makes it.
        right: the call that the others make in its place.
        heard: when the others are notified: "now", at their wait for the call; with their "next" waited call; or
            "never", as the call sends nothing in either direction.
    """

    kind: type[gm.GradmeshError]
    verb: str
    wrong: Work
    right: Work
    heard: Literal["now", "next", "never"] = "now"


A, S, D = gm.ArgumentError, gm.ShapeError, gm.DTypeError
CASES: dict[str, Case] = {}


def _rows(verb: str, right: Work, rows: dict[str, tuple[type[gm.GradmeshError], Work]]) -> None:
    for name, (kind, wrong) in rows.items():
        CASES[f"{verb}: {name}"] = Case(kind, verb, wrong, right)


def _at(rank: int, there: Tensor, elsewhere: Tensor) -> Tensor:
    return there if gm.rank() == rank else elsewhere


def _peer() -> int:
    return 1 - gm.rank()


def _odd(name: str) -> Tensor:
    """Of a dtype that torch has little more than a name for."""
    return torch.zeros(2, dtype=torch.uint8).view(getattr(torch, name))


_rows(
    "all_reduce",
    lambda: gm.all_reduce(ones(2), dst=gm.R),
    {
        "a number": (A, lambda: gm.all_reduce(3.0, dst=gm.R)),
        "nothing": (A, lambda: gm.all_reduce(None, dst=gm.R)),
        "a structure with a number in it": (A, lambda: gm.all_reduce([ones(2), 3], dst=gm.R)),
        "no convention": (A, lambda: gm.all_reduce(ones(2), dst=None)),
        "Python's own sum": (A, lambda: gm.all_reduce(ones(2), op=sum, dst=gm.R)),
        "bools": (D, lambda: gm.all_reduce(ones(2) > 0, dst=gm.I)),
        "the mean of integers": (D, lambda: gm.all_reduce(torch.arange(2), op="mean", dst=gm.R)),
        "the largest of complex numbers": (
            D,
            lambda: gm.all_reduce(ones(2, dtype=torch.complex64), op="max", dst=gm.R),
        ),
        "the product of bools": (D, lambda: gm.all_reduce(ones(2) > 0, op="prod", dst=gm.R)),
        "logsumexp of integers": (D, lambda: gm.all_reduce(torch.arange(2), op="logsumexp", dst=gm.R)),
        "uint16": (D, lambda: gm.all_reduce(ones(2, dtype=torch.uint16), dst=gm.R)),
        "bits8": (D, lambda: gm.all_reduce(_odd("bits8"), dst=gm.R)),
        "int1": (D, lambda: gm.all_reduce(_odd("int1"), dst=gm.R)),
    },
)
_rows(
    "all_gather",
    lambda: gm.all_gather(ones(2, 3)),
    {
        "a word": (A, lambda: gm.all_gather("x")),
        "an array": (A, lambda: gm.all_gather(np.ones(2))),
        "dim below the first": (A, lambda: gm.all_gather(ones(2, 3), dim=-3)),
        "dim a bool": (A, lambda: gm.all_gather(ones(2, 3), dim=True)),
        "dim a float": (A, lambda: gm.all_gather(ones(2, 3), dim=1.0)),
        "dim of a structure": (A, lambda: gm.all_gather({"a": ones(2), "b": ones(2, 3)}, dim=1)),
        "sizes a number": (A, lambda: gm.all_gather(ones(2, 3), sizes=2)),
        "sizes as floats": (A, lambda: gm.all_gather(ones(2, 3), sizes=(2.0, 2.0))),
        "sizes for three ranks": (A, lambda: gm.all_gather(ones(2, 3), sizes=(2, 2, 2))),
        "dst a bool": (A, lambda: gm.all_gather(ones(2, 3), dst=True)),
        "int4": (D, lambda: gm.all_gather(_odd("int4"))),
        "a dtype by name": (D, lambda: gm.all_gather(ones(2, 3), backward_dtype="float32")),
        "integers sent as floats": (
            D,
            lambda: gm.all_gather(torch.arange(2), comm_dtype=torch.float32),
        ),
    },
)
_rows(
    "reduce_scatter",
    lambda: gm.reduce_scatter(ones(4)),
    {
        "a list of tensors": (A, lambda: gm.reduce_scatter([ones(2), ones(2)])),
        "dim too large": (A, lambda: gm.reduce_scatter(ones(4), dim=1)),
        "no operation": (A, lambda: gm.reduce_scatter(ones(4), op=None)),
        "sizes that do not add up": (S, lambda: gm.reduce_scatter(ones(4), sizes=(1, 2))),
        "sizes to be asked for": (A, lambda: gm.reduce_scatter(ones(4), sizes="auto")),
        "one-byte floats": (D, lambda: gm.reduce_scatter(ones(4).to(torch.float8_e4m3fn))),
    },
)
_rows(
    "all_to_all",
    lambda: gm.all_to_all(ones(4)),
    {
        "a list of tensors": (A, lambda: gm.all_to_all([ones(2), ones(2)])),
        "split_dim too large": (A, lambda: gm.all_to_all(ones(4), split_dim=3)),
        "concat_dim too small": (A, lambda: gm.all_to_all(ones(4), concat_dim=-4)),
        "split_sizes negative": (A, lambda: gm.all_to_all(ones(4), split_sizes=(5, -1), concat_sizes=(2, 2))),
        "concat_sizes for three": (
            A,
            lambda: gm.all_to_all(ones(4), split_sizes=(2, 2), concat_sizes=(1, 1, 2)),
        ),
        "more than there is": (S, lambda: gm.all_to_all(ones(4), split_sizes=(3, 3), concat_sizes=(3, 3))),
    },
)
_rows(
    "broadcast",
    lambda: gm.broadcast(ones(2)),
    {
        "root missing": (A, lambda: gm.broadcast(ones(2), root=None)),
        "root a float": (A, lambda: gm.broadcast(ones(2), root=1.0)),
        "dst partial": (A, lambda: gm.broadcast(ones(2), dst=gm.P)),
        "a module": (A, lambda: gm.broadcast(torch.nn.Linear(1, 1))),
        "uint7": (D, lambda: gm.broadcast(_odd("uint7"))),
    },
)
_rows(
    "reduce",
    lambda: gm.reduce(ones(2)),
    {
        "root a bool": (A, lambda: gm.reduce(ones(2), root=True)),
        "bools": (D, lambda: gm.reduce(ones(2) > 0)),
    },
)
_rows(
    "gather",
    lambda: gm.gather(ones(2)),
    {
        "no tensor": (A, lambda: gm.gather(object())),
        "dim missing": (A, lambda: gm.gather(ones(2), dim=None)),
        "root a word": (A, lambda: gm.gather(ones(2), root="0")),
        "sizes too few": (A, lambda: gm.gather(ones(2), sizes=(2,))),
        "sizes that are not true": (S, lambda: gm.gather(ones(2), sizes=(3, 3))),
    },
)
_rows(
    "scatter",
    lambda: gm.scatter(_at(0, ones(4), ones(0))),
    {
        "nothing": (A, lambda: gm.scatter(None)),
        "dim a word": (A, lambda: gm.scatter(ones(4), dim="rows")),
        "root negative": (A, lambda: gm.scatter(ones(4), root=-1)),
        "sizes as floats": (A, lambda: gm.scatter(ones(4), sizes=(2.0, 2.0))),
    },
)
_rows(
    "shift",
    lambda: gm.shift(ones(2)),
    {
        "a structure with a word in it": (A, lambda: gm.shift({"a": "b"})),
        "offset missing": (A, lambda: gm.shift(ones(2), offset=None)),
        "dim too large": (A, lambda: gm.shift(ones(2), dim=4, sizes="auto")),
        "sizes too few": (A, lambda: gm.shift(ones(2), sizes=(2,))),
        "sizes that are not true": (S, lambda: gm.shift(ones(2), sizes=(3, 3))),
        "wrap missing": (A, lambda: gm.shift(ones(2), wrap=None)),
        "a real tensor sent as complex": (D, lambda: gm.shift(ones(2), comm_dtype=torch.complex64)),
    },
)
_rows(
    "permute",
    lambda: gm.permute(ones(2), pairs=[(0, 1)]),
    {
        "a structure with nothing in it": (A, lambda: gm.permute([ones(2), None], pairs=[(0, 1)])),
        "pairs as words": (A, lambda: gm.permute(ones(2), pairs=["01"])),
        "a source between two ranks": (A, lambda: gm.permute(ones(2), pairs=[(0.5, 1)])),
        "dim a list": (A, lambda: gm.permute(ones(2), pairs=[(0, 1)], dim=[0], sizes="auto")),
        "sizes that are not true": (S, lambda: gm.permute(ones(2), pairs=[(0, 1)], sizes=(9, 9))),
    },
)
_rows(
    "halo_exchange",
    lambda: gm.halo_exchange(ones(2)),
    {
        "a scalar": (A, lambda: gm.halo_exchange(torch.tensor(1.0))),
        "dim too large": (A, lambda: gm.halo_exchange(ones(2), dim=1)),
        "three halos": (A, lambda: gm.halo_exchange(ones(2), halo=(1, 1, 1))),
        "half a row": (A, lambda: gm.halo_exchange(ones(2), halo=0.5)),
        "one side negative": (A, lambda: gm.halo_exchange(ones(2), halo=(1, -1))),
        "wrap a word": (A, lambda: gm.halo_exchange(ones(2), wrap="yes")),
        "sizes that are not true": (S, lambda: gm.halo_exchange(ones(2), sizes=(1, 1))),
    },
)
_rows(
    "scan",
    lambda: gm.scan(ones(2)),
    {"reverse a number": (A, lambda: gm.scan(ones(2), reverse=1)), "nothing": (A, lambda: gm.scan(None))},
)
_rows(
    "exscan",
    lambda: gm.exscan(ones(2)),
    {
        "reverse missing": (A, lambda: gm.exscan(ones(2), reverse=None)),
        "bools": (D, lambda: gm.exscan(ones(2) > 0)),
    },
)
_rows(
    "sizes",
    lambda: gm.sizes(ones(2)),
    {"a list": (A, lambda: gm.sizes([1, 2])), "dim too large": (A, lambda: gm.sizes(ones(2), dim=5))},
)
_rows(
    "exchange",
    lambda: gm.exchange([ones(1), ones(2)]),
    {
        "a number": (A, lambda: gm.exchange(5)),
        "nothing": (A, lambda: gm.exchange([])),
        "a number among tensors": (A, lambda: gm.exchange([ones(1), 3])),
        "sixteen dimensions": (A, lambda: gm.exchange([ones([1] * 16), ones(1)])),
        "two devices": (A, lambda: gm.exchange([ones(1), ones(1, device="meta")])),
    },
)
_rows(
    "neighbor_all_to_all",
    lambda: gm.neighbor_all_to_all(
        ones(3), send_rows={_peer(): torch.tensor([0])}, receive_counts={_peer(): 1}
    ),
    {
        "lists": (A, lambda: gm.neighbor_all_to_all(ones(3), send_rows=[], receive_counts=[])),
        "a count that is half": (
            A,
            lambda: gm.neighbor_all_to_all(ones(3), send_rows={}, receive_counts={0: 0.5}),
        ),
        "a mask": (
            A,
            lambda: gm.neighbor_all_to_all(ones(3), send_rows={0: ones(3) > 0}, receive_counts={0: 3}),
        ),
        "an index elsewhere": (
            A,
            lambda: gm.neighbor_all_to_all(
                ones(3), send_rows={0: torch.empty(1, dtype=torch.int64, device="meta")}, receive_counts={}
            ),
        ),
        "a scalar": (A, lambda: gm.neighbor_all_to_all(torch.tensor(1.0), send_rows={}, receive_counts={})),
        "uint16": (
            D,
            lambda: gm.neighbor_all_to_all(ones(3, dtype=torch.uint16), send_rows={}, receive_counts={}),
        ),
    },
)

CASES |= {
    "shard: a word for the type": Case(
        A,
        "shard",
        lambda: gm.shard(ones(2), src="I"),
        lambda: gm.shard(ones(2).requires_grad_()),
        heard="next",
    ),
    "replicate: a list with a number in it": Case(
        A,
        "replicate",
        lambda: gm.replicate([1]),
        lambda: gm.replicate(ones(2).requires_grad_()),
        heard="next",
    ),
    "convert: to itself": Case(
        A,
        "convert",
        lambda: gm.convert(ones(2), src=gm.V, dst=gm.V),
        lambda: gm.convert(ones(2), src=gm.R, dst=gm.I),
        heard="never",
    ),
}


def outcomes(alone: bool) -> dict[str, tuple[str, str]]:
    """Make the wrong calls, on all ranks or on rank 0 alone; returns this rank's error of each, as class and text.

    After each a right call has to give the right result.
    """
    found: dict[str, tuple[str, str]] = {}
    for name, case in CASES.items():
        try:
            (case.right if alone and gm.rank() else case.wrong)()
        except Exception as error:
            found[name] = type(error).__name__, str(error)
        else:
            found[name] = "", ""
        if alone and case.heard == "next":
            try:
                gm.scan(ones(1))
            except gm.MismatchError as error:
                if gm.rank():
                    found[name] = "MismatchError", str(error)
        after = gm.all_gather(torch.tensor([gm.rank()])).tolist()
        assert after == [0, 1], f"{after} after {name}"
    return found
