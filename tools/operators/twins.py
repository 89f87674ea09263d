"""Operators in place, and on lists: the same values as their twins, and nothing else written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradmesh._torch import arguments_of
from tools.operators.proof import Case, RefutedError
from tools.operators.samples import Operand


def twins_of(name: str, text: str, seed: int = 0) -> list[str]:
    """The twins of an operator that did the same with a sample's operands."""
    base, _, overload = name.partition(".")
    case = Case(name, text, seed)
    if base.endswith("_") or case.rule.made == "~":
        return []
    values = {one: case.draw(one) for one in case.places}
    found = []
    for other, lists in ((f"{base}_", False), (f"_foreach_{base}", True), (f"_foreach_{base}_", True)):
        func = _like(other, overload, case, lists=lists)
        if func is None:
            continue
        try:
            made = _made(case, func, values, lists=lists)
        except (RuntimeError, TypeError, NotImplementedError):
            continue
        want = case.run(values)
        writes = other.endswith("_")
        for given, result, before in made:
            got = given if writes else result
            if got.shape != want[0].shape or got.dtype != want[0].dtype:
                continue
            if not torch.equal(got.nan_to_num(), want[0].nan_to_num()):
                raise RefutedError(f"{other} is not {name}")
            if not writes and not torch.equal(given.nan_to_num(), before.nan_to_num()):
                raise RefutedError(f"{other} writes its operand")
            found.append(other)
    return sorted(set(found))


def _like(other: str, overload: str, case: Case, *, lists: bool) -> Any:
    """The overload of a twin that takes the same arguments."""
    packet = getattr(torch.ops.aten, other, None)
    if packet is None or not case.args or not isinstance(case.args[0], Operand):
        return None
    names = packet.overloads()
    if lists:
        tensors = sum(isinstance(one, Operand) for one in case.args)
        overload = (
            "List"
            if tensors > 1 and "List" in names
            else "Scalar"
            if tensors < 2 and "Scalar" in names
            else "default"
        )
        if len(case.args) < 2:
            overload = "default"
    chosen = overload or "default"
    return getattr(packet, chosen) if chosen in names and arguments_of(getattr(packet, chosen)) else None


def _made(
    case: Case, func: Any, values: dict[Operand, Tensor], *, lists: bool
) -> Sequence[tuple[Tensor, Tensor, Tensor]]:
    """What it was given first, what it returned, and what that was before."""

    def filled(value: Any) -> Any:
        if isinstance(value, Operand):
            return [values[value].clone(), values[value].clone()] if lists else values[value].clone()
        return [filled(one) for one in value] if isinstance(value, list) else value

    args = [filled(one) for one in case.args]
    result = func(*args, **{key: filled(one) for key, one in case.kwargs.items()})
    before = values[case.args[0]]  # type: ignore[index]
    if not lists:
        return [(args[0], result, before)]
    results = result if isinstance(result, list | tuple) else args[0]
    return [(given, made, before) for given, made in zip(args[0], results, strict=True)]
