"""Verbs on tuples, lists and dicts of tensors: one message for all tensors of a dtype, for elementwise verbs.

The tensors are packed and unpacked with differentiable torch functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from gradmesh._util.structure import Packed, cut, cut_by_rank, leaves, rebuilt
from gradmesh.autograd.pending import Pending, combined
from gradmesh.dims import DimLike, known_names, show_names, with_names
from gradmesh.errors import ArgumentError, DTypeError
from gradmesh.runtime.mesh import Axis, AxisLike, resolve
from gradmesh.transport.run import withdraw
from gradmesh.verbs.call import Call

T = TypeVar("T")
X = TypeVar("X")
Run = Callable[[Any], Tensor | Pending[Tensor]]
"""The verb with all its arguments but the operand."""


def per_leaf(verb: str, x: X, axis: AxisLike, run: Run) -> Any:
    """Call the verb for each tensor separately."""
    done = [_named(name, run, leaf) for name, leaf in _leaves(x, verb, resolve(axis, verb))]
    return _finished(done, lambda results: cast("X", rebuilt(x, iter(results))))


def packed(verb: str, x: X, axis: AxisLike, run: Run) -> Any:
    """Apply an elementwise collective to all leaves, by `run` with one flat message (`Packed`) per dtype."""
    here = resolve(axis, verb)
    found = _leaves(x, verb, here)
    for name, leaf in found:
        _named(name, Call, verb, leaf, here)
    return _in_groups(x, found, run, lambda whole, group: cut(whole, [leaf for _, leaf in group]))


def gathered(x: X, axis: AxisLike, dim: DimLike, run: Run) -> Any:
    """Apply `all_gather` along `dim` to all leaves; `run` gathers one flat message (`Packed`) per dtype along dim 0."""
    here = resolve(axis, "all_gather")
    given = _leaves(x, "all_gather", here)
    found = [(name, leaf.reshape(1) if leaf.dim() == 0 else leaf) for name, leaf in given]
    calls = [_named(name, Call, "all_gather", leaf, here) for name, leaf in found]
    dims = {name: _named(name, call.dim, dim) for (name, _), call in zip(found, calls, strict=True)}
    ranks = here.size

    def cut_them(whole: Tensor, group: list[tuple[str, Tensor]]) -> list[Tensor]:
        return cut_by_rank(whole, [leaf for _, leaf in group], [dims[name] for name, _ in group], ranks)

    return _in_groups(x, found, run, cut_them)


def _in_groups(
    x: X,
    found: list[tuple[str, Tensor]],
    run: Run,
    divide: Callable[[Tensor, list[tuple[str, Tensor]]], list[Tensor]],
) -> Any:
    """Run once for each dtype, split the results, and rebuild the structure."""
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[str, Tensor]]] = {}
    for name, leaf in found:
        groups.setdefault((leaf.dtype, leaf.device), []).append((name, leaf))
    wholes: list[Tensor | Pending[Tensor]] = []
    for group in groups.values():
        flat = torch.cat([leaf.reshape(-1) for _, leaf in group])
        operand_desc = ", ".join(f"{name}{list(leaf.shape)}{_names(leaf)}" for name, leaf in group)
        if len(groups) > 1:  # so that ranks whose structures differ in another dtype raise here
            operand_desc += f" (one of {len(groups)} dtypes: {', '.join(str(dtype) for dtype, _ in groups)})"
        wholes.append(_named(", ".join(name for name, _ in group), run, Packed(flat, operand_desc)))

    def finish(results: list[Tensor]) -> X:
        done: dict[str, Tensor] = {}
        for whole, group in zip(results, groups.values(), strict=True):
            for (name, leaf), part in zip(group, divide(whole, group), strict=True):
                done[name] = with_names(part, known_names(leaf))
        return cast("X", rebuilt(x, iter([done[name] for name, _ in found])))

    return _finished(wholes, finish)


def _names(leaf: Tensor) -> str:
    names = known_names(leaf)
    return "" if names is None else f" of {show_names(names)}"


def _finished(done: list[Tensor | Pending[Tensor]], finish: Callable[[list[Tensor]], X]) -> Any:
    """`finish` of the results; a `Pending` of it if a result is pending."""
    pending = [one for one in done if isinstance(one, Pending)]
    if pending:
        return combined(pending, finish)
    return finish(cast("list[Tensor]", done))


def _leaves(x: object, verb: str, here: Axis) -> list[tuple[str, Tensor]]:
    """The tensors of a structure by name; on an error the other ranks are notified."""
    try:
        return leaves(x, verb, str(here))
    except ArgumentError as error:
        withdraw(verb, here, None, error)
        raise


def _named(name: str, call: Callable[..., T], *args: Any) -> T:
    """Call, and add the tensor's name to an error."""
    try:
        return call(*args)
    except (ArgumentError, DTypeError) as error:
        error.args = (f"{error}\n  operand   {name}",)
        raise
