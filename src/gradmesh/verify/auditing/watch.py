"""Detects forbidden side effects: writes into operands and gradients, results that share the operands' memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradmesh.verify.auditing.subject import backward_line, nodes

__all__ = ["Note", "Watch", "changed", "shared"]

Note = tuple[str, str, str | None]
"""The kind, the text and the line."""


def changed(
    kind: str, text: str, now: Sequence[Tensor], before: Sequence[Tensor], lines: Sequence[str]
) -> list[Note]:
    """Notes on tensors whose values changed; with the line if there is only one Function."""
    line = lines[0] if len(lines) == 1 else None
    return [
        (kind, text.format(index), line)
        for index, (a, b) in enumerate(zip(now, before, strict=True))
        if not _same(a, b)
    ]


def shared(given: Sequence[Tensor], results: Sequence[Tensor]) -> list[Note]:
    """Notes on results that share the operands' memory, unless they are views known to autograd."""
    notes: list[Note] = []
    for i, x in enumerate(given):
        for j, y in enumerate(results):
            if type(y) is not Tensor or not y.numel() or not x.numel():
                continue
            if y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
                continue
            lines = [line for line in map(backward_line, nodes([y])) if line is not None]
            if lines or not y.requires_grad:
                text = f"result {j} shares the memory of operand {i}"
                notes.append(("result-aliases-operand", text, lines[0] if lines else None))
    return notes


class Watch:
    """Compares the incoming gradients of the autograd Functions in a graph before and after their backward.

    Attributes:
        lines: "file:line" of the backward of each Function.
    """

    def __init__(self, results: Sequence[Tensor]) -> None:
        self.lines: list[str] = []
        self._handed: list[tuple[str, str, Tensor, Tensor]] = []
        for node in nodes(results):
            line = backward_line(node)
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
        """Notes on the gradients that were written into."""
        found = [
            ("gradient-overwritten", f"{name}.backward writes into its incoming gradient", line)
            for name, line, grad, copy in self._handed
            if not _same(grad, copy)
        ]
        return list(dict.fromkeys(found))


def _local(x: Tensor) -> Tensor:
    """The tensor, or the local shard of a DTensor, because comparing DTensors would communicate."""
    local: Any = x.detach()
    return local.to_local() if hasattr(local, "to_local") else local  # type: ignore[no-any-return]


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a.detach()), torch.nan_to_num(b))
