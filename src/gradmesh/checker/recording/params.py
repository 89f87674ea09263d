"""Parameters at a step: what each rank has of them and of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradmesh.checker.recording.gradients import Moved
from gradmesh.checker.recording.tape import Param

__all__ = ["nameless", "parameters_of", "values_after"]


def parameters_of(
    held: Sequence[Any],
    names: dict[int, str],
    id_of: Callable[[Tensor], int | None],
    returned: dict[int, Tensor],
    change_of: Callable[[Any, Tensor | None], Moved] = lambda *_: Moved(),
) -> list[Param]:
    """Copies of parameters and gradients.

    Args:
        held: the parameters.
        names: of each, by its identity.
        id_of: the number of a leaf.
        returned: gradients that the program asked for, by the identity of the parameter.
        change_of: what the program made of a parameter's gradient.
    """
    found = []
    for at, p in enumerate(held):
        grad = p.grad if p.grad is not None else returned.get(id(p))
        local = _local(p)
        known = id_of(local)
        name = names.get(id(p), "") or f"parameter {at} of shape {tuple(p.shape)}"
        param = Param(name, known, local.detach().clone(), None if grad is None else _copy(grad))
        if local is p and not (grad is not None and id(p) in returned and p.grad is None):
            moved = change_of(p, grad)
            param.factor, param.share, param.changed = moved.factor, moved.share, moved.changed
        if local is not p:
            param.mesh = p.device_mesh.mesh.tolist()
            param.placements = _placements(p)
            param.grad_placements = [] if grad is None else _placements(grad)
            param.whole = tuple(p.shape)
        found.append(param)
    return found


def nameless(number: int | None) -> str:
    """What a parameter that no module has is called before a step."""
    return f"#{number}"


def values_after(params: Sequence[Param], held: Sequence[Any]) -> None:
    """Add what the step made of them."""
    for param, p in zip(params, held, strict=False):
        param.after = _copy(p)


def _local(x: Any) -> Tensor:
    return getattr(x, "_local_tensor", x)  # type: ignore[no-any-return]


def _copy(x: Any) -> Tensor:
    local = _local(x).detach()
    return local.to_dense() if local.layout is not torch.strided else local.clone()


def _placements(x: Any) -> list[tuple[str, int]]:
    found = []
    for each in getattr(x, "placements", ()):
        if each.is_shard():
            found.append(("shard", int(each.dim)))
        else:
            found.append(("replicate" if each.is_replicate() else "partial", 0))
    return found
