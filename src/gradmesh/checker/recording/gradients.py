"""Which tensor is the gradient of which parameter, while backward, averaging and clipping go on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gradmesh._torch.dispatched import arguments, written
from gradmesh.checker.recording.tape import Changed
from gradmesh.type_inference.operators import tensors_in
from gradmesh.type_inference.tracker import memory_of

__all__ = ["Changes", "Gradients", "Moved", "address_of", "gradient_of", "is_mean", "is_multiple"]


class Gradients:
    """Where the gradients of parameters are in memory; empty until a backward has ended.

    Args:
        parameters: those there are, each with its name.
    """

    def __init__(self, parameters: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._parameters = parameters
        self._at: dict[tuple[int, int], tuple[str, weakref.ref[Tensor]]] = {}
        """By address and size: FSDP's flat gradient begins where that of its first parameter does."""
        self._named: list[tuple[str, weakref.ref[Tensor]]] = []
        self._sought = False

    def find(self) -> None:
        """Look where they are, after a backward."""
        self._sought = True
        self._named = [(name, weakref.ref(p)) for name, p in self._parameters()]
        self._look()

    def _look(self) -> None:
        self._at = {}
        for name, held in self._named:
            p = held()
            gradient = None if p is None else gradient_of(p)
            if gradient is not None:
                self._at[_span(gradient)] = name, held

    def forget(self) -> None:
        """A step is over."""
        self._at, self._named, self._sought = {}, [], False

    def name_at(self, x: Tensor) -> str | None:
        """The parameter whose gradient a tensor is; None for another tensor.

        Programs replace gradients, and memory that one has left is used again: what is found is looked at once more,
        and what is not found is sought.
        """
        if not self._sought or x.requires_grad:
            return None
        at = _span(x)
        if not self._is_there(at):
            self._look()
        return self._at[at][0] if at in self._at and at[0] else None

    def part_of(self, x: Tensor) -> str | None:
        """The parameter of whose gradient a tensor is a part: some rows, say, or the imaginary parts; else None."""
        if not self._sought or x.requires_grad or not x.numel() or self.name_at(x) is not None:
            return None
        at, last = address_of(x), _end_of(x)
        for name, held in self._named:
            p = held()
            gradient = None if p is None else gradient_of(p)
            if gradient is None or not address_of(gradient) <= at <= last <= _end_of(gradient):
                continue
            if x.numel() * x.element_size() < gradient.numel() * gradient.element_size():
                return name
        return None

    def _is_there(self, at: tuple[int, int]) -> bool:
        entry = self._at.get(at)
        p = None if entry is None else entry[1]()
        gradient = None if p is None else gradient_of(p)
        return gradient is not None and _span(gradient) == at


def gradient_of(p: Tensor) -> Tensor | None:
    """This rank's part of a parameter's gradient."""
    gradient: Any = p.grad
    return None if gradient is None else getattr(gradient, "_local_tensor", gradient)


def _span(x: Tensor) -> tuple[int, int]:
    return address_of(x), x.numel() * x.element_size()


def _end_of(x: Tensor) -> int:
    """Where the last entry of a tensor ends."""
    steps = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return address_of(x) + (steps + 1) * x.element_size()


def is_multiple(x: Tensor, of: Tensor) -> bool:
    """Whether a tensor is a number times another one, but for rounding."""
    a, b = x.detach().flatten().double(), of.detach().flatten().double()
    return bool((a @ b).abs() > (1 - 1e-5) * a.norm() * b.norm())


def address_of(x: Tensor) -> int:
    """Where a tensor itself begins; several may share a memory."""
    try:
        return x.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


@dataclass(frozen=True)
class Moved:
    """What a tensor is that is made of gradients.

    Attributes:
        factor: what they were multiplied by, in another tensor than their own, and
        share: the same, where it may be that of a mean over ranks.
        own: whether by a number that comes from gradients.
        number: whether it is such a number itself: a norm, a product of two gradients.
        changed: the first operation on them that is neither a sum nor a multiple; None where there is none.
    """

    factor: float = 1.0
    share: float = 1.0
    own: bool = False
    number: bool = False
    changed: Changed | None = None


class Changes:
    """What a program makes of gradients between a backward and a step, but for sums over ranks and multiples.

    Args:
        gradients: where they are.
        site: the number of the program's line that is being run.
        ranks: how many there are.
    """

    def __init__(self, gradients: Gradients, site: Callable[[], int], ranks: int) -> None:
        self._gradients, self._site, self._ranks = gradients, site, ranks
        self._by_name: dict[str, Moved] = {}
        self._by_store: dict[int, tuple[Tensor, Moved]] = {}
        self.read = False
        """Whether the program has read a number that comes from gradients."""

    def forget(self) -> None:
        """A step is over."""
        self._by_name, self._by_store, self.read = {}, {}, False

    def of(self, x: Tensor) -> Moved | None:
        """What is known of a tensor; None for one that is not made of gradients."""
        name = self._gradients.name_at(x)
        if name is not None and name in self._by_name:
            return self._by_name[name]
        entry = self._by_store.get(_memory(x))
        if entry is not None:
            return entry[1]
        return None if name is None else Moved()

    def arrives(self, tensors: Iterable[Tensor]) -> None:
        """A collective or a message has written these: gradients of other ranks, as it is after a backward."""
        for x in tensors:
            if x.is_floating_point() and self.of(x) is None:
                self._by_store[_memory(x)] = x, Moved()

    def follow(self, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Run an operator, and say what its results are."""
        given = list(tensors_in((args, kwargs)))
        name = func.overloadpacket.__name__
        bound = arguments(func, args, kwargs) if written(func) else {}
        targets = [x for key in written(func) for x in tensors_in(bound.get(key))]
        changed = [name != "copy_" and self._changes_part(name, x) for x in targets]
        if changed and all(changed):
            return run()
        if not any(self.of(x) is not None for x in given):
            return run()
        if name.endswith("_like") or name.startswith("new_"):
            return run()  # takes no more than what it looks like
        bound = bound or arguments(func, args, kwargs)
        if name == "_local_scalar_dense":
            self.read = True
        elif name in ("zero_", "fill_") and all(self._gradients.name_at(x) is None for x in targets):
            for x in targets:
                self._by_store.pop(_memory(x), None)
            return run()
        each = name.startswith("_foreach_") or "non_finite" in name
        plain = name.removeprefix("_foreach_").rstrip("_")
        lists = [
            value for value in bound.values() if isinstance(value, (list, tuple)) and list(tensors_in(value))
        ]
        if each and lists:
            others = [x for value in bound.values() if isinstance(value, Tensor) for x in [value]]
            rows = [[*row, *others] for row in zip(*(list(tensors_in(part)) for part in lists), strict=False)]
            made = [self._made(plain, row, bound) for row in rows]
        else:
            made = [self._made(plain, given, bound)]
        result = run()
        outs = targets or list(tensors_in(result))
        if "non_finite" in name:
            return result
        for at, x in enumerate(outs):
            moved = made[at] if each and at < len(made) else made[0]
            if moved is None or not (x.is_floating_point() or x.is_complex()):
                continue
            # The squares of a gradient of one entry are summed as those of others are: for a norm.
            reduces = moved.changed is not None or any(y.numel() > 1 for y in given)
            if x.numel() == 1 and reduces and plain in _TO_NUMBERS:
                moved = Moved(number=True)
            self._mark(x, moved, inplace=bool(targets))
        return result

    def _changes_part(self, name: str, x: Tensor) -> bool:
        """Whether an operator writes to a part of a gradient, which is then another one."""
        part = self._gradients.part_of(x)
        if part is not None:
            known = self._by_name.get(part, Moved())
            changed = known.changed or Changed(f"{name} of a part of it", self._site())
            self._by_name[part] = replace(known, changed=changed)
        return part is not None

    def _mark(self, x: Tensor, moved: Moved, *, inplace: bool) -> None:
        name = self._gradients.name_at(x)
        if inplace and name is not None:
            known = self._by_name.get(name)
            changed = known.changed if known is not None and known.changed else moved.changed
            # A factor that a gradient is multiplied by in place is recorded as such.
            factor, share = (known.factor, known.share) if known is not None else (1.0, 1.0)
            self._by_name[name] = replace(moved, changed=changed, factor=factor, share=share)
        else:
            self._by_store[_memory(x)] = x, moved

    def _made(self, name: str, operands: Sequence[Tensor], bound: dict[str, Any]) -> Moved | None:
        """What an operator makes of some tensors."""
        moved = [(x, known) for x in operands if (known := self.of(x)) is not None]
        if not moved:
            return None
        if all(known.number for _, known in moved):
            # A number that gradients are multiplied by in place is seen there.
            wide = [x for x in operands if self.of(x) is None and x.numel() > 1]
            return None if wide and name in ("mul", "div") else Moved(number=True)
        full = [(x, known) for x, known in moved if not known.number]
        first = full[0][1]
        alike = all(
            known.factor == first.factor and known.share == first.share and known.own == first.own
            for _, known in full
        )
        before = next((known.changed for _, known in full if known.changed is not None), None)
        if before is not None:
            return replace(first, changed=before)
        if name in _KEEPS:
            return first if alike else self._changed(name, full)
        if name in ("mul", "div") and len(full) == 1:
            numbers = [x for x in operands if x is not full[0][0]]
            number: Any = (
                numbers[0] if numbers else bound.get("other", bound.get("scalar", bound.get("scalars")))
            )
            if isinstance(number, Tensor) and (number.numel() == 1 or _is_one_number(number)):
                own = any(known.number for _, known in moved) or self.read
                value = float(number.flatten()[0])
            elif isinstance(number, (int, float)):
                own, value = self.read, float(number)
            else:
                return self._changed(name, full)
            if name == "div":
                value = 1 / value if value else 0.0
            if is_mean(value, self._ranks):
                return replace(first, share=first.share * value)
            return replace(first, factor=first.factor * value, own=first.own or own)
        if name in ("add", "sub"):
            others = [x for x in operands if self.of(x) is None]
            weighed = abs(float(bound.get("alpha", 1) or 0)) != 1 and self.read
            sizes = {x.numel() for x, _ in full}
            if any(bool(x.any()) for x in others) or not alike or len(sizes) > 1:
                return self._changed(name, full)
            if len(full) > 1 and (first.own or weighed or any(known.number for _, known in moved)):
                return self._changed(name, full)
            return first
        return self._changed(name, full)

    def _changed(self, name: str, full: Sequence[tuple[Tensor, Moved]]) -> Moved:
        x, known = full[0]
        before = x.detach().clone() if len(full) == 1 else None
        return Moved(known.factor, known.share, known.own, changed=Changed(name, self._site(), before))


_KEEPS = {
    "view",
    "_unsafe_view",
    "_reshape_alias",
    "clone",
    "detach",
    "alias",
    "t",
    "transpose",
    "permute",
    "slice",
    "select",
    "narrow",
    "split",
    "split_with_sizes",
    "chunk",
    "unbind",
    "cat",
    "stack",
    "copy",
    "_to_copy",
    "to",
    "expand",
    "squeeze",
    "unsqueeze",
    "as_strided",
    "index_select",
    "constant_pad_nd",
    "neg",
    "sum",
    "mean",
    "lift_fresh",
    "_coalesced",
    "coalesce",
    "_to_dense",
    "resize",
    "set",
}
"""Operators that move gradients, or add them up."""
_TO_NUMBERS = {
    "sum",
    "mean",
    "norm",
    "linalg_vector_norm",
    "dot",
    "vdot",
    "max",
    "amax",
    "mv",
    "mm",
    "linalg_norm",
}


def is_mean(factor: float, ranks: int) -> bool:
    """Whether a factor is that of a mean over ranks, or takes one back."""
    return factor > 0 and any(
        abs(factor * n - 1) < 1e-6 or abs(factor / n - 1) < 1e-6 for n in range(2, ranks + 1)
    )


def _is_one_number(x: Tensor) -> bool:
    return x.numel() > 0 and bool((x == x.flatten()[0]).all())


def _memory(x: Tensor) -> int:
    """Where a tensor's memory is."""
    try:
        return int(memory_of(x))
    except (RuntimeError, NotImplementedError):
        return 0
