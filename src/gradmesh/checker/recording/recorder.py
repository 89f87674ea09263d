"""The recorder: sees every operator of a rank, and writes those down that gradients pass through."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradmesh._torch.dispatch import DispatchMode, WeakTensors, arguments, is_random, written
from gradmesh.call_sites import Site, call_site
from gradmesh.checker.findings import Place
from gradmesh.checker.recording.collectives import Call, call_of
from gradmesh.checker.recording.names import Modules
from gradmesh.checker.recording.tape import Alias, Called, Given, Op, Ref, Saved, Scaled, Sent, Tape

__all__ = ["Recorder"]

_PLAIN = {Tensor, torch.nn.Parameter, torch.nn.Buffer}
_OF_PARTS = {"DTensor", "AsyncCollectiveTensor"}
_SCALING = {"mul_", "div_", "_foreach_mul_", "_foreach_div_"}


@dataclass(slots=True)
class _Known:
    """What the recorder knows of a tensor.

    Attributes:
        id: its number on the tape.
        active: whether a gradient passes to a parameter from it.
        version: autograd's count of writes to data, when it was copied.
        spoilt: whether it was written to where no gradients are followed.
        leaf: whether it is a parameter.
        received: whether another rank sent it.
    """

    id: int
    active: bool
    version: int
    spoilt: bool = False
    leaf: bool = False
    received: bool = False


class Recorder(DispatchMode):  # type: ignore[misc]
    """Records what this rank's program does while the context is open.

    Args:
        tape: what it writes to.
        modules: the names of the program's parameters.
        log: a file that says of each collective, before it is made, what it is.
    """

    def __init__(self, tape: Tape, modules: Modules, log: Path | None = None) -> None:
        super().__init__()
        self.tape, self.modules = tape, modules
        self.calls: list[Called] = []
        self.sends = 0
        """Collectives so far."""
        self.backward = 0
        """Depth of backwards that build no graph."""
        self.stepping = False
        self.quiet = False
        """Whether the recorder itself is at work."""
        self.roots = 0
        """Backwards since the last step."""
        self.written_by_hand: Callable[[], None] = lambda: None
        """Is called when the program is about to write to a parameter itself."""
        self.saved: dict[int, weakref.ref[Tensor]] = {}
        """Where autograd keeps what it needs for backward, and for how long."""
        self.gradients: dict[int, str] = {}
        """Where gradients are in memory, and of which parameter."""
        self._known: Any = WeakTensors()
        self._stores: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._random: Any = WeakTensors()
        self._cut: Any = WeakTensors()
        """Made of what other ranks sent of tensors that autograd follows, where gradients are off."""
        self._numbers = 0
        self._sites: dict[tuple[Any, int], int] = {}
        self._totals: list[tuple[Sent, weakref.ref[Tensor]]] = []
        self._log = log.open("w", buffering=1) if log else None

    # -- what torch calls ----------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and write it down where gradients pass through."""
        kwargs = kwargs or {}
        if self.quiet:
            return func(*args, **kwargs)
        if not _PLAIN.issuperset(types):
            if not any(each.__name__ in _OF_PARTS for each in types):
                return func(*args, **kwargs)  # a fake tensor's
            self.see_parts(args, kwargs)
            return NotImplemented  # what it does to its plain parts comes by itself
        if func.namespace in ("c10d", "_c10d_functional"):
            return self._collective(func, args, kwargs)
        if not self._follows() or (self.gradients and self._is_about_gradients(func, args)):
            if self._cut and self._is_cut(args, kwargs):
                return self._record(func, args, kwargs)
            return self._apart(func, args, kwargs)
        given = list(_tensors((args, kwargs)))
        draws = is_random(func) and not written(func) and func.overloadpacket.__name__ != "native_dropout"
        if draws or not any(self._is_active(x) for x in given):
            return self._apart(func, args, kwargs)  # what was drawn cannot be drawn again: it is data
        return self._record(func, args, kwargs)

    def _follows(self) -> bool:
        return (bool(self.calls) or torch.is_grad_enabled()) and not self.backward and not self.stepping

    def _is_cut(self, args: Any, kwargs: Any) -> bool:
        inside = self.backward or self.stepping
        return not inside and any(x in self._cut for x in _tensors((args, kwargs)))

    def _is_about_gradients(self, func: Any, args: Any) -> bool:
        """Whether an operator writes to gradients, with gradients followed though they are not meant to be."""
        return bool(written(func)) and any(_begin(x) in self.gradients for x in _tensors(args[:1]))

    def see_parts(self, args: Any, kwargs: Any) -> None:
        """Take this rank's part of a DTensor that is a parameter for the parameter."""
        for x in _tensors((args, kwargs)):
            local: Any = getattr(x, "_local_tensor", None)
            leaf = x.requires_grad and x.is_leaf and type(local) is Tensor
            if leaf and self._follows() and local not in self._known:
                self._leaf(local, self.modules.name_of(x))

    def _apart(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator that no gradient passes through."""
        targets = written(func)
        if targets and not self.backward and not self.stepping:
            self._see_writing(func, args, kwargs, targets)
        if not self._random and not is_random(func):
            return func(*args, **kwargs)
        drawn = is_random(func) or any(x in self._random for x in _tensors((args, kwargs)))
        result = func(*args, **kwargs)
        if drawn:
            for x in _tensors(result):
                self._random[x] = True
        return result

    def _see_writing(self, func: Any, args: Any, kwargs: Any, targets: frozenset[str]) -> None:
        told = arguments(func, args, kwargs)
        for name in targets:
            for x in _tensors(told.get(name)):
                store = _address(x)
                if _begin(x) in self.gradients:
                    operator = func.overloadpacket.__name__
                    if operator in _SCALING:
                        self._scaled(told, name, inverse="div" in operator)
                    return
                known = self._at(x, store)
                if known is not None and known.leaf and self.roots:
                    self.written_by_hand()
                    return
                if known is not None and known.active and not known.leaf:
                    known.spoilt = True

    def _at(self, x: Tensor, store: int) -> _Known | None:
        """What is known of a tensor, or of another in the same memory."""
        known: _Known | None = self._known.get(x)
        if known is None and store in self._stores:
            owner = self._stores[store][0]()
            known = None if owner is None else self._known.get(owner)
        return known

    def _scaled(self, told: dict[str, Any], name: str, *, inverse: bool) -> None:
        gradients = list(_tensors(told[name]))
        others = [value for key, value in told.items() if key != name][:1]
        factors = others[0] if others and isinstance(others[0], (list, tuple)) else others * len(gradients)
        for gradient, factor in zip(gradients, factors, strict=False):
            number = factor.item() if isinstance(factor, Tensor) and factor.numel() == 1 else factor
            if isinstance(number, (int, float)) and _begin(gradient) in self.gradients:
                of = self.gradients[_begin(gradient)]
                self.tape.events.append(Scaled(of, 1 / number if inverse else float(number), self.site()))

    # -- numbers -------------------------------------------------------------------------------------------------

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
        self._known, self._stores = WeakTensors(), {}
        self.saved.clear()
        self.gradients, self.roots = {}, 0

    def id_of(self, x: Tensor) -> int | None:
        """The number of a tensor, where it has one."""
        known = self._known.get(x)
        return None if known is None else known.id

    def alias(self, x: Tensor) -> int | None:
        """Number another view of known memory."""
        return self._alias(x)

    def leaves(self) -> list[Tensor]:
        """The parameters that were met since the last step."""
        return [x for x, known in self._known.items() if known.leaf]

    def was_received(self, x: Tensor) -> bool:
        """Whether another rank sent it."""
        known = self._known.get(x)
        return known is not None and known.received

    def _number(self, x: Tensor, active: bool, **more: bool) -> int:
        self._numbers += 1
        self._known[x] = _Known(self._numbers, active, _version(x), **more)
        if active and type(x) in (Tensor, torch.nn.Parameter):
            self._stores[_address(x)] = (weakref.ref(x), self._numbers)
        return self._numbers

    def _leaf(self, x: Tensor, name: str) -> int:
        number = self._number(x, True, leaf=True)
        self.tape.events.append(Given(number, x.detach().clone(), True, name))
        return number

    def _is_active(self, x: Tensor) -> bool:
        known = self._known.get(x)
        if known is not None:
            return bool(known.active)
        if x.requires_grad:
            return True
        return bool(self.calls) and self._alias(x) is not None

    def _alias(self, x: Tensor) -> int | None:
        """Number another view of memory that is known, made without an operator."""
        entry = self._stores.get(_address(x))
        owner = entry and entry[0]()
        if entry is None or owner is None or owner.dtype != x.dtype:
            return None
        if owner.is_leaf and not self.calls and not x.requires_grad:
            return None  # `.data` of a parameter
        number = self._number(x, True)
        shape, stride = tuple(x.shape), tuple(x.stride())
        self.tape.events.append(Alias(number, entry[1], shape, stride, int(x.storage_offset())))
        return number

    def ref(self, x: Tensor) -> int:
        """The number of a tensor that an operator takes; what is not known is data."""
        known = self._known.get(x)
        if known is not None and not known.spoilt and (known.active or known.version == _version(x)):
            return int(known.id)
        if known is not None and known.spoilt:
            return self._lost(x, "a tensor was written to where gradients are off")
        if x.requires_grad and x.is_leaf:
            return self._leaf(x, self.modules.name_of(x))
        if known is None and (x.requires_grad or self.calls):
            number = self._view(x) if x.requires_grad else None
            number = self._alias(x) if number is None else number
            if number is not None:
                return number
            if x.requires_grad:
                return self._lost(x, "where a tensor came from is not known")
        random = x in self._random
        number = self._number(x, False)
        self.tape.events.append(Given(number, x.detach().clone(), random=random))
        return number

    def _lost(self, x: Tensor, why: str) -> int:
        """Take a tensor for data, with a word on why, which counts where a loss depends on it."""
        number = self._number(x, True)
        self.tape.events.append(Given(number, x.detach().clone(), lost=why, site=self.site()))
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
                self._stores[_address(each)] = (weakref.ref(each), known.id)

    # -- operators -----------------------------------------------------------------------------------------------

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = str(func)
        targets = written(func)
        told = arguments(func, args, kwargs) if targets else {}
        written_to = [x for key in targets for x in _tensors(told.get(key))]
        for x in written_to:
            self.target(x)
        taken = _mapped(args, self.ref), _mapped(kwargs, self.ref)
        event = Op(name, *taken, [], self.site(), self.calls[-1].number if self.calls else None)
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__ == "native_dropout":
            return self._dropped(event, args, result)
        self.tape.events.append(event)
        drawn = is_random(func)
        for x in _tensors(result):
            known = self._known.get(x)
            event.outs.append(
                known.id if known is not None else self._number(x, x.is_floating_point() or x.is_complex())
            )
            if drawn:
                self._random[x] = True
            if not self._follows():
                self._cut[x] = True
        for x in written_to:
            self._holds_gradients(x)
        return result

    def _dropped(self, event: Op, args: Any, result: Any) -> Any:
        """Dropout is a product, with a mask that does not have to be drawn again."""
        made, mask = result
        scale = mask.to(made.dtype) / (1 - args[1]) if args[2] else torch.ones_like(made)
        self._numbers += 1
        self.tape.events.append(Given(self._numbers, scale, random=True))
        outs = [self._number(made, True)]
        of = event.args[0]
        self.tape.events.append(
            Op("aten.mul.Tensor", (of, Ref(self._numbers - 1)), {}, outs, event.site, event.call)
        )
        return result

    # -- collectives ---------------------------------------------------------------------------------------------

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = call_of(func, args, kwargs)
        if call is None:
            return self._waited(func, args, kwargs)
        self.sends += 1
        message = call.kind in ("send", "recv")
        grads = torch.is_grad_enabled() or bool(self.calls)
        gradients = any(_begin(x) in self.gradients for x in call.ins) if self.gradients else False
        apart = call.kind == "barrier" or gradients or self.backward or self.stepping
        # What autograd follows, sent where gradients are off: they are cut there, on purpose or not.
        cut = not grads and any(self._is_hidden(x) or x in self._cut for x in call.ins)
        followed = not apart and (grads or message or cut)
        phase = "backward" if self.backward else "forward" if followed else "apart"
        site = self.site()
        event = Sent(call.kind, call.ranks, call.name, [], [], site, self._in_call(), phase=phase)
        event.reduce, event.root, event.tag, event.splits = call.reduce, call.root, call.tag, call.splits
        event.shapes = [tuple(x.shape) for x in call.ins or call.outs or []]
        event.followed = followed and all(
            x.is_floating_point() or x.is_complex() for x in (*call.ins, *(call.outs or ()))
        )
        event.hidden = followed and not self.calls and any(self._is_hidden(x) for x in call.ins)
        if self._log is not None:
            place = self.tape.places[site] if site >= 0 else None
            self._log.write(f"{call.kind}\t{call.name}\t{call.ranks}\t{event.shapes}\t{call.root}\t{place}\n")
        self._see_overwriting(call, site)
        if event.followed:
            event.ins = [self.ref(x) for x in call.ins]
            event.outs = [self.target(x) for x in call.outs or ()]
        result = func(*args, **kwargs)
        self.tape.events.append(event)
        if event.followed:
            made = list(_tensors(result)) if call.outs is None else call.outs
            if call.outs is None:
                event.outs = [self._number(x, True) for x in made]
            for x in made:
                self._holds_gradients(x)
                if cut:
                    self._cut[x] = True
                self._known[x].received = call.kind == "recv"
        elif phase == "apart" and call.kind == "all_reduce" and call.reduce == "sum" and len(call.ins) == 1:
            self._remember(event, call.ins[0])
        return result

    def _remember(self, event: Sent, x: Tensor) -> None:
        if x.numel() == 1:
            event.total = float("nan")  # known when the call is over: it may be asynchronous
            self._totals.append((event, weakref.ref(x)))

    def settle(self) -> None:
        """Read what sums came to, once they are over."""
        for event, x in self._totals:
            tensor = x()
            if tensor is not None:
                event.total = float(tensor)
        self._totals.clear()

    def _waited(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator that only waits for one, or wraps its result."""
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__ in ("wait_tensor", "_wrap_tensor_autograd"):
            for old, new in zip(_tensors(args), _tensors(result), strict=False):
                known = self._known.get(old)
                if known is not None and new not in self._known and type(new) is Tensor:
                    self._known[new] = known
        return result

    def _in_call(self) -> int | None:
        if not self.calls:
            return None
        for call in self.calls:
            call.sends = True
        return self.calls[-1].number

    def _is_hidden(self, x: Tensor) -> bool:
        return x.requires_grad

    def _see_overwriting(self, call: Call, site: int) -> None:
        for x in call.outs or ():
            kept = self.saved.get(_address(x))
            if kept is not None and kept() is not None:
                self.tape.events.append(Saved(call.kind, site, site))


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _address(x: Tensor) -> int:
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # no memory of its own
        return 0


def _begin(x: Tensor) -> int:
    """Where a tensor itself begins; several may share a memory."""
    try:
        return x.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)


def _mapped(value: Any, ref: Callable[[Tensor], int]) -> Any:
    if isinstance(value, Tensor):
        return Ref(ref(value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(part, ref) for part in value)
    if isinstance(value, dict):
        return {key: _mapped(part, ref) for key, part in value.items()}
    return value
