"""Which tensor of the program has which number on the tape."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradmesh._torch.dispatched import WeakTensors, version_of
from gradmesh._util.call_sites import Site, call_site
from gradmesh.checker.findings import Place
from gradmesh.checker.recording.gradients import Changes, Gradients, Moved, gradient_of
from gradmesh.checker.recording.names import Modules
from gradmesh.checker.recording.params import nameless
from gradmesh.checker.recording.tape import Alias, Called, Changed, ProgramInput, Ref, Tape
from gradmesh.type_inference.tracker import memory_of

__all__ = ["Known", "Numbering", "mapped"]


@dataclass(slots=True)
class Known:
    """What the recorder knows of a tensor.

    Attributes:
        id: its number on the tape.
        active: whether a gradient passes to a parameter from it.
        version: autograd's count of writes to data, when it was copied.
        spoilt: whether it was written to where no gradients are followed.
        leaf: whether it is a parameter.
        received: whether another rank sent it.
        given: of a parameter, what the tape has of it until it is used.
        size: of a parameter, how many entries it had.
    """

    id: int
    active: bool
    version: int
    spoilt: bool = False
    leaf: bool = False
    received: bool = False
    given: ProgramInput | None = None
    size: int = -1


class Numbering:
    """The numbers of tensors, and the lines of the program, on one tape.

    Args:
        tape: what is written to.
        modules: the names of the program's parameters.
    """

    def __init__(self, tape: Tape, modules: Modules) -> None:
        super().__init__()
        self.tape, self.modules = tape, modules
        self.calls: list[Called] = []
        """The calls of Functions that are going on."""
        self.quiet = False
        """Whether the recorder itself is at work."""
        self.roots = 0
        """Backwards since the last step."""
        self.saved: dict[int, weakref.ref[Tensor]] = {}
        """Where autograd keeps what it needs for backward, and for how long."""
        self.gradients = Gradients(self._parameters)
        """Which tensors are gradients, and of which parameter."""
        self.changes = Changes(self.gradients, self.site, tape.size)
        """What the program makes of them."""
        self.made: dict[int, Tensor] = {}
        """The gradients that backward left, by the identity of the parameter."""
        self._known: Any = WeakTensors()
        self._stores: dict[tuple[Any, ...], list[weakref.ref[Tensor]]] = {}
        """The tensors that are followed, by their memory and how they read it, in the order in which they came."""
        self._held: dict[int, weakref.ref[Tensor]] = {}
        """Parameters by their memory, of which there may be other views."""
        self._kept: Any = WeakTensors()
        """What autograd keeps for backward, as its hooks see it."""
        self._random: Any = WeakTensors()
        self._numbers = 0
        self._sites: dict[tuple[Any, int], int] = {}

    def site(self) -> int:
        """The number of the program's line that is being run."""
        return self.number_of(call_site())

    def number_of(self, found: Site) -> int:
        """The number of a line."""
        if found is None:
            return -1
        code, line = found
        key = (code, line)
        if key not in self._sites:
            self._sites[key] = len(self.tape.places)
            self.tape.places.append(Place(code.co_filename, line, code.co_qualname, ""))
        return self._sites[key]

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """What is done in here is not the program's."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before

    def forget(self) -> None:
        """Begin anew, after a step: parameters have other values."""
        self._known, self._stores, self._held = WeakTensors(), {}, {}
        self.saved.clear()
        self.roots = 0

    def backward_begins(self) -> None:
        """The first backward after a step: what is known of gradients is of the steps before."""
        if not self.roots:
            self.gradients.forget()
            self.changes.forget()
            self.made = {}
        self.roots += 1

    def backward_is_over(self) -> None:
        """Look where the gradients are."""
        self.gradients.find()
        for _, p in self._parameters():
            gradient = gradient_of(p)
            if gradient is not None:
                self.made[id(p)] = gradient

    def change_of(self, p: Any, gradient: Tensor | None) -> Moved:
        """What the program made of a parameter's gradient since backward."""
        made = self.made.get(id(p))
        if gradient is None:
            return Moved() if made is None else Moved(changed=Changed("taken away", -1))
        known = self.changes.of(gradient)
        if known is not None:
            return known
        if not self.made:
            return Moved()
        same = made is not None and memory_of(made) == memory_of(gradient)
        return Moved() if same or not gradient.any() else Moved(changed=Changed("replaced", -1))

    def id_of(self, x: Tensor) -> int | None:
        """The number of a tensor, where it has one."""
        known = self._known.get(x)
        return None if known is None else known.id

    def alias(self, x: Tensor) -> int | None:
        """Number another view of known memory."""
        return self._alias(x)

    def leaves(self) -> list[Tensor]:
        """The parameters that were met since the last step, but those whose memory was let go of, as FSDP does."""
        return [x for x, known in self._known.items() if known.leaf and (memory_of(x) or not x.numel())]

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        names = self.modules.names()
        held = {id(leaf): leaf for leaf in self.leaves()} | {id(p): p for p in self.modules.parameters()}
        for key, p in held.items():
            yield names.get(key) or nameless(self.id_of(p)), p

    def was_received(self, x: Tensor) -> bool:
        """Whether another rank sent it."""
        known = self._known.get(x)
        return known is not None and known.received

    def _number(self, x: Tensor, active: bool, *, leaf: bool = False) -> int:
        self._numbers += 1
        return self._numbered(x, self._numbers, active, leaf=leaf)

    def _numbered(self, x: Tensor, number: int, active: bool, *, leaf: bool = False) -> int:
        self._known[x] = Known(number, active, version_of(x), leaf=leaf)
        if active and type(x) in (Tensor, torch.nn.Parameter):
            self._share(x)
        return number

    def _share(self, x: Tensor) -> None:
        """Remember a tensor that is followed by its memory."""
        there = [each for each in self._stores.get(_read(x), ()) if each() is not None]
        self._stores[_read(x)] = [*there, weakref.ref(x)]

    def _leaf(self, x: Tensor, name: str) -> int:
        number = self._number(x, True, leaf=True)
        known = self._known[x]
        known.size = x.numel()
        self._held[memory_of(x)] = weakref.ref(x)
        with self.unseen():
            known.given = ProgramInput(number, x.detach().clone(), True, name)
            self.tape.events.append(known.given)
        return number

    def used(self, x: Tensor) -> None:
        """An operator takes a tensor: a parameter may have got its value since it was met, from another rank say."""
        known = self._known.get(x)
        if known is None or known.given is None:
            return
        with self.unseen():
            if x.shape == known.given.value.shape and not torch.equal(x, known.given.value):
                known.given.value = x.detach().clone()
        known.given = None

    def overwritten(self, x: Tensor) -> None:
        """An operator that is written down writes to a tensor: what parameters there were until then counts."""
        held = self._held.get(memory_of(x), lambda: None)()
        for each in (x, held, *(y() for y in self._stores.get(_read(x), ()))):
            if each is not None:
                self.used(each)

    def _is_active(self, x: Tensor) -> bool:
        known = self._known.get(x)
        if known is not None:
            return bool(known.active)
        if x.requires_grad:
            return True
        return bool(self.calls) and self._alias(x) is not None

    def _alias(self, x: Tensor) -> int | None:
        """Number another view of memory that is known, made without an operator."""
        owner = self._owner(x)
        if owner is None or (owner.is_leaf and not self.calls and not x.requires_grad):
            return None  # `.data` of a parameter
        of = self._known[owner].id
        number = self._number(x, True)
        shape, stride = tuple(x.shape), tuple(x.stride())
        self.tape.events.append(Alias(number, of, shape, stride, int(x.storage_offset())))
        return number

    def _owner(self, x: Tensor) -> Tensor | None:
        """A tensor that is followed, or a parameter, whose memory another one shares and reads in the same way.

        The same part of it if there is one, else the largest: gradients pass through what both have.
        """
        if not memory_of(x):
            return None
        there = [each() for each in self._stores.get(_read(x), ())]
        there.append(self._held.get(memory_of(x), lambda: None)())
        alive = [y for y in there if y is not None and y in self._known and _read(y) == _read(x)]
        alike = (y for y in alive if _part(y) == _part(x))
        return next(alike, max(alive, key=Tensor.numel, default=None))

    def keep(self, x: Tensor) -> None:
        """Autograd keeps this for backward, and of the program's own tensor of that memory maybe no more."""
        self._kept[x] = True
        owner = self._owner(x)
        known = None if owner is None else self._known[owner]
        if owner is None or known is None or known.leaf:
            return
        if _part(owner) == _part(x):
            self._known[x] = known
            self._share(x)
        elif not owner.is_leaf:
            self._alias(x)

    def taken_back(self, kept: Tensor, x: Tensor) -> None:
        """Autograd takes it back, as another tensor."""
        if kept not in self._kept:  # a checkpoint's own, of what it computes again
            self.keep(kept)
        self._kept[x] = True
        if kept in self._known:
            self._known[x] = self._known[kept]

    def ref(self, x: Tensor) -> int:
        """The number of a tensor that an operator takes; what is not known is data."""
        known = self._known.get(x)
        if (
            known is not None and known.leaf and known.size != x.numel()
        ):  # FSDP gathers a parameter that it cut
            return self._leaf(x, self.modules.name_of(x))
        if known is not None and not known.spoilt and (known.active or known.version == version_of(x)):
            return int(known.id)
        if known is not None and known.spoilt:
            return self._lost(x, "a tensor was written to where gradients are off")
        if x.requires_grad and x.is_leaf:
            known = self._parameter_at(x)
            return self._leaf(x, self.modules.name_of(x)) if known is None else known.id
        if known is None and (x.requires_grad or self.calls):
            number = self._view(x) if x.requires_grad else None
            number = self._alias(x) if number is None else number
            if number is not None:
                return number
            if x.requires_grad and x.numel():  # where there is nothing, nothing is lost
                return self._lost(x, "where a tensor came from is not known")
        random = x in self._random
        number = self._number(x, False)
        self.tape.events.append(ProgramInput(number, x.detach().clone(), random=random))
        return number

    def _parameter_at(self, x: Tensor) -> Known | None:
        """What is known of a parameter that autograd hands out as another tensor."""
        held = self._held.get(memory_of(x), lambda: None)()
        if held is None or (_part(held), _read(held)) != (_part(x), _read(x)):
            return None
        known: Known | None = self._known.get(held)
        return known

    def constant(self, x: Tensor) -> None:
        """Take a tensor for data that autograd follows, and whose gradient goes nowhere."""
        number = self._number(x, True)
        with self.unseen():
            self.tape.events.append(ProgramInput(number, x.detach().clone()))

    def _lost(self, x: Tensor, why: str) -> int:
        """Take a tensor for data, with a word on why, which counts where a loss depends on it."""
        number = self._number(x, True)
        self.tape.events.append(ProgramInput(number, x.detach().clone(), lost=why, site=self.site()))
        return number

    def _view(self, x: Tensor) -> int | None:
        base = x._base
        known = None if base is None else self._known.get(base)
        if known is None:
            return None
        number = self._number(x, True)
        self.tape.events.append(
            Alias(number, known.id, tuple(x.shape), tuple(x.stride()), int(x.storage_offset()))
        )
        return number

    def target(self, x: Tensor) -> int:
        """The number of a tensor that is about to be written to, with the memory that it is a view of."""
        if x not in self._known and x._base is not None:
            base = x._base
            known = self._known.get(base)
            whole = self.ref(base) if known is None else known.id
            number = self._number(x, False)
            self.tape.events.append(
                Alias(number, whole, tuple(x.shape), tuple(x.stride()), int(x.storage_offset()))
            )
            return number
        return self.ref(x)

    def _holds_gradients(self, x: Tensor) -> None:
        """Something active was written there."""
        for each in (x, x._base):
            known = None if each is None else self._known.get(each)
            if each is not None and known is not None:
                known.active, known.spoilt = True, False
                self._share(each)

    def _at(self, x: Tensor, store: int) -> Known | None:
        """What is known of the parameter in a tensor's memory, of the tensor, or of another that is there."""
        parameter = self._held.get(store, lambda: None)()
        others = [each() for each in self._stores.get(_read(x), ())]
        found = (self._known.get(each) for each in (parameter, x, *reversed(others)) if each is not None)
        return next((known for known in found if known is not None), None)


def _read(x: Tensor) -> tuple[Any, ...]:
    """The memory of a tensor, and how it is read."""
    return memory_of(x), x.dtype, x.is_conj(), x.is_neg()


def _part(x: Tensor) -> tuple[Any, ...]:
    """Which part of its memory a tensor is."""
    return x.shape, x.stride(), x.storage_offset()


def mapped(value: Any, ref: Callable[[Tensor], int]) -> Any:
    """Arguments with numbers in the place of tensors."""
    if isinstance(value, Tensor):
        return Ref(ref(value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(part, ref) for part in value)
    if isinstance(value, dict):
        return {key: mapped(part, ref) for key, part in value.items()}
    return value
