"""Compare gradients with the duals of their tensors' types: what is I gets the same gradient on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradmesh.type_inference.digest import number_of_bits, observable, token, within
from gradmesh.type_inference.findings import Condition, Finding, began_at
from gradmesh.type_inference.kinds import SAMES, I, P, V, shown
from gradmesh.type_inference.tape import Node
from gradmesh.type_inference.tracker import Tracker
from gradmesh.types import Type

__all__ = ["look_at", "watch"]


def look_at(tracker: Tracker, parameters: Sequence[Tensor]) -> None:
    """Note the gradients that parameters have, before a step uses them or the block ends."""
    for x in parameters:
        grad = x.grad
        node = None if tracker.tape.find(x) is None else tracker.node_of(x)
        if node is None or not observable(x):
            continue
        for at, mark in enumerate(node.marks):
            if mark.kind != I or not mark.number:
                continue
            # Another rank may have freed the parameter, and then it has no gradient that could be compared.
            looked = tracker.looked_at(at, mark.number)
            if grad is None or not observable(grad):
                continue
            busy, tracker.busy = tracker.busy, True
            try:
                number = number_of_bits(grad)
                plain = not node.declared and _plain(x)
            finally:
                tracker.busy = busy
            pair = token("gradient", mark.number, number)
            tracker.agreement.say(at, pair)
            tracker.expect(
                Condition(
                    lambda at=at, node=node: _missing(tracker, at, node),  # type: ignore[misc]
                    at,
                    (mark.number, looked),
                    token("missing", mark.number, number),
                    (pair,),
                    doubtful=f"the gradients of a parameter {list(x.shape)} of equal entries differ over axis "
                    f"{tracker.axes[at].name!r}: if it is one and the same on every rank, declare it I with "
                    "gm.assert_type, and its sum is missing; if each rank has its own, declare it V"
                    if plain
                    else "",
                )
            )


def _plain(x: Tensor) -> bool:
    """Whether ranks may have the same by chance: all zeros, all ones, or more than one of another number."""
    values = x.detach().flatten()
    return bool((values == values[:1]).all()) and (x.numel() > 1 or bool((values == 0) | (values == 1)))


def _missing(tracker: Tracker, at: int, leaf: Node) -> Finding:
    """The finding, with the line where the copies part ways, and the collective next to the parameter."""
    agreed = tracker.agreement.agreed
    parted = collective = None
    for root in tracker.roots:
        depends = {id(leaf)}
        for node in sorted(root.before(), key=lambda node: node.depth):
            if not any(id(one) in depends for one in node.inputs):
                continue
            depends.add(id(node))
            if node.collective:
                collective = collective or node
            mark = node.marks[at]
            same = mark.kind in SAMES and agreed(at, mark.number)
            if parted is None and not same and mark.kind != P:
                parted = node
        if parted is not None:
            break
    began = (
        "no collective lies between the loss and it"
        if collective is None
        else f"the nearest collective between the loss and it is {collective.op} "
        + began_at("", collective.site)[11:]
    )
    axis, shape = tracker.axes[at].name, list(leaf.shape)
    op, site = ("a parameter", leaf.site) if parted is None else (f"aten.{parted.op}", parted.site)
    others = (
        ""
        if parted is None
        else ", ".join(
            f"{shown(one.marks[at].kind) if one.marks[at].kind == V or agreed(at, one.marks[at].number) else V}"
            f"{list(one.shape)}"
            for one in parted.inputs
        )
    )
    return Finding.at("missing-sum", op, axis, others or f"I{shape}", site, f"of I{shape}; {began}")


def watch(tracker: Tracker, x: Tensor, at: int, kind: Type) -> None:
    """Hold the gradient that a declared tensor will get against the dual of its type."""
    if kind.dual not in (Type.I, Type.R) or not x.requires_grad:
        return

    def arrived(grad: Tensor) -> None:
        if not tracker.open or tracker.aside:
            return
        node = tracker.node_of(within(grad))
        mark = node.marks[at]
        if mark.kind not in SAMES and mark.kind != V:
            return
        axis, shape = tracker.axes[at].name, list(grad.shape)
        last = next((one for one in node.before() if one.collective), None)
        began = "" if last is None else f"the collective before it in backward: {last.op}"
        finding = Finding.at(
            "declared-gradient",
            f"the gradient of a value declared {kind}",
            axis,
            f"V{shape}",
            node.site,
            began,
            f"a gradient of type {kind.dual}",
        )
        absent = (mark.number,) if mark.kind != V else ()
        own = token("declared", at, node.site and node.site[1], mark.number, tuple(shape))
        tracker.expect(Condition(lambda: finding, at, (), own, absent))

    x.register_hook(arrived)
