"""What the ways mean that a verb is called in, for the tensors of a group of ranks side by side; with torch alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tools.attack.calls import BY_HAND, DERIVATIVES, VMAPS
from tools.attack.meanings import MEANINGS, Params, need


def _column(tree: Any) -> Tensor:
    if isinstance(tree, Tensor):
        return tree.reshape(-1, 1)
    return torch.cat([_column(one) for one in (tree.values() if isinstance(tree, dict) else tree)])


def _leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for one in (tree.values() if isinstance(tree, dict) else tree) for leaf in _leaves(one)]


Meaning = Callable[[list[Tensor], list[Params]], list[Tensor]]


def _once(made: Callable[[Tensor], Any], xs: Sequence[Tensor]) -> list[Any]:
    """Each rank's, one for all ranks where the tensor is one."""
    found = {id(x): made(x) for x in xs}
    return [found[id(x)] for x in xs]


def _of_structures(inner: Meaning, text: str, xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    trees = _once(lambda x: _leaves(eval(text.format("x"), {"x": x})), xs)
    done = [inner(list(leaves), ps) for leaves in zip(*trees, strict=True)]
    columns: dict[tuple[int, ...], Tensor] = {}
    for own in zip(*done, strict=True):
        columns.setdefault(tuple(map(id, own)), _column(own))
    return [columns[tuple(map(id, own))] for own in zip(*done, strict=True)]


def _of_batches(inner: Meaning, dim: int, xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    batch = xs[0].shape[dim]
    need(batch and all(x.shape[dim] == batch for x in xs))
    rows = _once(lambda x: x.unbind(dim), xs)
    done = [inner([own[i] for own in rows], ps) for i in range(batch)]
    stacked: dict[tuple[int, ...], Tensor] = {}
    for own in zip(*done, strict=True):
        stacked.setdefault(tuple(map(id, own)), torch.stack(own, dim))
    return [stacked[tuple(map(id, own))] for own in zip(*done, strict=True)]


def _energy(y: Tensor) -> Tensor:
    return (y * y.conj()).real.sum() + y.real.sin().sum()


def _own(xs: Sequence[Tensor]) -> list[Tensor]:
    """Each rank's operand as a variable of its own, that has a derivative whether or not its loss is asked for one."""
    return [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in xs]


def _derived(inner: Meaning, way: str, xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    if way == "jvp":
        return list(
            torch.func.jvp(lambda *own: tuple(inner(list(own), ps)), tuple(xs), tuple(x.cos() for x in xs))[1]
        )
    with torch.enable_grad():
        own = _own(xs)
        ys = list({id(y): y for y in inner(own, ps)}.values()) if ps[0].get("dst") == "I" else inner(own, ps)
        if way == "grad":
            total = sum((_energy(y) for y in ys), torch.zeros(()))
            found = torch.autograd.grad(total, own, create_graph=True, materialize_grads=True)
        else:
            found = torch.autograd.grad(
                ys, own, [y.sin() for y in ys], create_graph=True, materialize_grads=True
            )
    kept = any(x.requires_grad for x in xs) and torch.is_grad_enabled()
    return [g if kept else g.detach() for g in found]


def meaning(verb: str, way: str) -> Meaning:
    """What a verb means that is called in some way."""
    plain = MEANINGS[verb]
    if way in ("", BY_HAND):
        return plain
    if way in DERIVATIVES:
        return partial(_derived, plain, way)
    if way in VMAPS:
        return partial(_of_batches, plain, int(way[-1]))
    return partial(_of_structures, plain, way)
