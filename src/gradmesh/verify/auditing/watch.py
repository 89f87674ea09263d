"""What a call may not do to tensors that others hold: write into operands and gradients, share memory with results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradmesh.verify.auditing.subject import nodes, own_node

__all__ = ["Note", "Watch", "changed", "shared"]

Note = tuple[str, str, str | None]
"""A kind, what was seen, and the line that did it."""


def changed(
    kind: str, text: str, now: Sequence[Tensor], before: Sequence[Tensor], lines: Sequence[str]
) -> list[Note]:
    """Notes of tensors that are no longer what they were; the line is told where only one Function is at work."""
    line = lines[0] if len(lines) == 1 else None
    return [
        (kind, text.format(index), line)
        for index, (a, b) in enumerate(zip(now, before, strict=True))
        if not _same(a, b)
    ]


def shared(given: Sequence[Tensor], results: Sequence[Tensor]) -> list[Note]:
    """Notes of results in the operands' memory, unless they are views that autograd knows of."""
    notes: list[Note] = []
    for i, x in enumerate(given):
        for j, y in enumerate(results):
            if type(y) is not Tensor or not y.numel() or not x.numel():
                continue
            if y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
                continue
            lines = [line for line in map(own_node, nodes([y])) if line is not None]
            if lines or not y.requires_grad:
                text = f"result {j} is the memory of operand {i}"
                notes.append(("result-aliases-operand", text, lines[0] if lines else None))
    return notes


class Watch:
    """Looks at the gradients that autograd Functions in a graph are handed, before and after.

    Attributes:
        lines: where the backwards of those Functions begin.
    """

    def __init__(self, results: Sequence[Tensor]) -> None:
        self.lines: list[str] = []
        self._handed: list[tuple[str, str, Tensor, Tensor]] = []
        for node in nodes(results):
            line = own_node(node)
            if line is None:
                continue
            if line not in self.lines:
                self.lines.append(line)
            node.register_prehook(self._before(type(node).__name__.removesuffix("Backward"), line))

    def _before(self, name: str, line: str) -> Callable[[Sequence[Tensor | None]], None]:
        def look(grads: Sequence[Tensor | None]) -> None:
            for grad in grads:
                if grad is not None:
                    local = _local(grad)
                    self._handed.append((name, line, local, local.clone()))

        return look

    def notes(self) -> list[Note]:
        """What was written into."""
        found = [
            ("gradient-overwritten", f"{name}.backward writes into the gradient it is handed", line)
            for name, line, grad, copy in self._handed
            if not _same(grad, copy)
        ]
        return list(dict.fromkeys(found))


def _local(x: Tensor) -> Tensor:
    """The tensor, or this rank's part of one that is distributed: comparing those would talk to other ranks."""
    local: Any = x.detach()
    return local.to_local() if hasattr(local, "to_local") else local  # type: ignore[no-any-return]


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a.detach()), torch.nan_to_num(b))
