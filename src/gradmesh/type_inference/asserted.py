"""`assert_type`: what a tensor is over the ranks, written down, and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from torch import Tensor

from gradmesh.axis import Axis, AxisLike, resolve
from gradmesh.call_sites import call_site
from gradmesh.errors import ArgumentError, TypeMismatchError, message
from gradmesh.type_inference import gradients, kinds
from gradmesh.type_inference.agreement import gathered
from gradmesh.type_inference.block import current
from gradmesh.type_inference.digest import number_of_bits, observable, token, within
from gradmesh.type_inference.findings import Finding, types_of
from gradmesh.type_inference.tape import Mark
from gradmesh.type_inference.tracker import Tracker, together
from gradmesh.types import I, P, R, Type, V
from gradmesh.withdrawal import withdraw

__all__ = ["assert_type"]


def assert_type(x: Tensor, types: Type | Mapping[str, Type]) -> Tensor:
    """Declare a tensor's type over the ranks, and check it.

    A value that is declared R or I is compared bit for bit, so every rank of the axis has to make this call. Inside of
    `gradmesh.typed` the tensor has that type from here on, and its gradient is compared with the dual type. A tensor of
    another known type is a finding. Varying values may be declared P, a pending sum, and values that are the same on
    every rank may be declared V.

    Args:
        x: the tensor.
        types: its type over each axis, by the axis' name in the current mesh; or one type, over the mesh's only axis or
            the world.

    Returns:
        The tensor itself.

    Raises:
        TypeMismatchError: the ranks' values differ, and are said to be R or I.
        ArgumentError: something else than types.
        AxisError: there is no such axis.

    Example:
        >>> def on_each_rank():
        ...     x = torch.ones(2)
        ...     gm.assert_type(x, gm.R)
        ...     return gm.assert_type(x * gm.rank(), gm.V).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0.0, 0.0], [1.0, 1.0]]
    """
    given: Mapping[AxisLike, Type] = types if isinstance(types, Mapping) else {None: types}  # type: ignore[assignment]
    for name, kind in given.items():
        axis = resolve(name, "assert_type")
        if not isinstance(kind, Type) or not isinstance(x, Tensor):
            _refuse(axis, x, kind)
        tracker = current()
        at = None if tracker is None or tracker.aside else tracker.place_of(axis)
        if kind in (R, I):
            _compare(axis, x, kind, tracker)
        if tracker is not None and at is not None:
            _declare(tracker, at, x, kind)
    return x


def _compare(axis: Axis, x: Tensor, kind: Type, tracker: Tracker | None) -> None:
    """Refuse values that are said to be the same and are not."""
    x = within(x)
    if axis.size == 1 or not observable(x):
        return
    busy = tracker is not None and tracker.busy
    if tracker is not None:
        tracker.busy = True
    try:
        numbers = gathered(axis, [number_of_bits(x)], x.device, operand_desc=f"assert_type of gm.{kind}")
    finally:
        if tracker is not None:
            tracker.busy = busy
    if len(set(numbers)) > 1:
        raise TypeMismatchError(
            message(
                f"a tensor is said to be {kind}, and differs from rank to rank",
                op="assert_type",
                axis=str(axis),
                expected="the same bits on every rank",
                got="\n".join(
                    f"rank {rank}: values number {one & 0xFFFFF}" for rank, (one,) in enumerate(numbers)
                ),
                remedy="look for what makes it differ (data, dropout, the order of a sum), or say gm.V or gm.P",
            )
        )


def _declare(tracker: Tracker, at: int, x: Tensor, kind: Type) -> None:
    """Take the tensor for what it is declared, and say so if it is known to be something else."""
    part = within(x)
    node, axis = tracker.node_of(part), tracker.axes[at]
    rows = tracker.meet(axis, f"assert_type {kind}", [node.marks[at]], x.device)
    known = together([row[0] for row in rows])
    learns = x.requires_grad
    wrong = {
        P: known == kinds.I or known == kinds.R,
        R: known == kinds.P or (learns and known == kinds.I),
        I: known == kinds.P or (learns and known == kinds.R),
    }.get(kind, known == kinds.P)
    if wrong:
        types, took = types_of([(known, node.shape)]), f"a value of type {kind}, as it is declared"
        tracker.found(
            Finding.at("declared-otherwise", "gm.assert_type", axis.name, types, call_site(), took=took)
        )
    serial = tracker.next_call(axis.global_ranks)
    number = node.marks[at].number
    if kind is V:
        number = 0
    elif kind is P or known not in kinds.SAMES:  # the same bits, made in different ways
        number = token("declared", axis.global_ranks, serial)
    tracker.mark(part, node, at, Mark(str(kind), number), declared=True)
    gradients.watch(tracker, x, at, kind)


def _refuse(axis: Axis, x: object, kind: object) -> NoReturn:
    error = ArgumentError(
        message(
            "x must be a tensor, and types its type over each axis",
            op="assert_type",
            axis=str(axis),
            expected='a tensor, and gm.V, gm.R, gm.I or gm.P for each axis: {"tp": gm.P}',
            got=f"{type(x).__name__} and {kind!r}",
            remedy='name each axis and its type, as in assert_type(x, {"tp": gm.P})',
        )
    )
    if isinstance(x, Tensor):
        withdraw("assert_type", axis, x, error)
    raise error
