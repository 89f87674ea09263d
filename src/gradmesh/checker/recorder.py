"""The recorder: sees every operator of a rank, and writes those down that gradients pass through."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor

from gradmesh._torch import functorch_active, is_fake
from gradmesh._torch.compilers import resolve_group
from gradmesh._torch.operators import (
    DispatchMode,
    WeakTensors,
    arguments,
    arguments_of,
    base_of,
    group_behind,
    is_random,
    local_part,
    namespaces,
    redistribution_observer,
    reduction_of,
    run_kernel,
    version_of,
    written,
)
from gradmesh._util.call_sites import Site, call_site
from gradmesh._util.structure import tensors_in
from gradmesh.autograd.traced import encode
from gradmesh.checker.findings import Place
from gradmesh.checker.observed import Handles, Mixing
from gradmesh.checker.trace import (
    MOVES,
    Alias,
    Back,
    Called,
    Changed,
    Changes,
    Gradients,
    Lost,
    Modules,
    Moved,
    Op,
    ProgramInput,
    Ref,
    Saved,
    Scaled,
    Sent,
    Tape,
    Term,
    Verb,
    Written,
    address_of,
    gradient_of,
    is_multiple,
    nameless,
)
from gradmesh.ops.all_reduce import Extremum
from gradmesh.ops.base import Op as LibraryOp
from gradmesh.ops.mean import Mean
from gradmesh.ops.pair import Receive, Send
from gradmesh.ops.transport import bytes_of
from gradmesh.runtime.mesh import Axis
from gradmesh.runtime.state import Instrument
from gradmesh.transport.comm_thread import current_job
from gradmesh.type_inference.collectives import COLLECTIVES
from gradmesh.type_inference.tracker import memory_of
from gradmesh.types import Type


@dataclass(slots=True)
class Known:
    """What the recorder knows of a tensor."""

    id: int  # its number on the tape
    active: bool  # whether a gradient passes to a parameter from it
    version: int  # autograd's count of writes to data, when it was copied
    spoilt: bool = False  # whether it was written to where no gradients are followed
    leaf: bool = False  # whether it is a parameter
    received: bool = False  # whether another rank sent it
    given: ProgramInput | None = None  # of a parameter, what the tape has of it until it is used
    size: int = -1  # of a parameter, how many entries it had


_UNKNOWN = Known(-1, False, -1)
_UPDATES = {"add", "sub", "mul", "addcmul", "addcdiv", "lerp", "detach", "alias", "clone", "_to_copy", "view"}
"""What new values of parameters are made by."""


class Numbering:
    """The numbers of tensors, and the lines of the program, on one tape; modules name the program's parameters."""

    def __init__(self, tape: Tape, modules: Modules) -> None:
        super().__init__()
        self.tape, self.modules = tape, modules
        self.calls: list[Called] = []
        """The calls of Functions that are going on."""
        self.quiet = False
        """Whether the recorder itself is at work."""
        self.roots = 0
        """Backwards since the last step."""
        self.left_over: dict[int, tuple[Tensor, int | None]] = {}
        """By address the parameters, with their numbers, whose gradients an optimizer's step left to the program."""
        self.has_optimizer = False
        """Whether the program has made an optimizer."""
        self.saved: dict[int, weakref.ref[Tensor]] = {}
        """Where autograd keeps what it needs for backward, and for how long."""
        self.gradients = Gradients(self.parameters)
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
        self._still: Any = WeakTensors()
        """What is made of parameters that take no gradient and of buffers, with the identities of these."""
        self.taken: dict[int, frozenset[int]] = {}
        """Those of them that operators took since the last step, by number; gradients pass through these operators."""
        self._updated: dict[int, tuple[int, int]] = {}
        """By its memory what is made of a parameter since the last step: the number of that one, and the line."""
        self._older: Any = WeakTensors()
        """The numbers of tensors that were made before the last step."""
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
        for x, known in self._known.items():
            if known.active and not known.leaf and not known.spoilt:
                self._older[x] = known.id
        self._known, self._stores, self._held = WeakTensors(), {}, {}
        self.saved.clear()
        self.taken, self._updated = {}, {}
        self.roots = 0

    def backward_begins(self) -> None:
        """The first backward after a step: what is known of gradients is of the steps before."""
        if not self.roots:
            self.gradients.forget()
            self.changes.forget()
            self.made = {}
        self.changes.backward_begins()
        self.roots += 1
        self.left_over = {}

    def updates(self, func: Any, given: Sequence[Tensor], result: Any) -> None:
        """An operator may have made the next value of a parameter, from the parameter or from what is made of it."""
        name = func.overloadpacket.__name__
        of = {x.shape: number for x in reversed(given) if (number := self._updates(x)) is not None}
        if name.removeprefix("_foreach_") in _UPDATES:
            for x in tensors_in(result) if of else ():
                if x.shape in of and x.is_floating_point():
                    self._updated[memory_of(x)] = of[x.shape], self.site()

    def _updates(self, x: Tensor) -> int | None:
        known = self._known.get(x)
        if known is not None and known.leaf:
            return int(known.id)
        return self._updated[memory_of(x)][0] if memory_of(x) in self._updated else None

    def renewed(self, x: Tensor) -> tuple[Tensor, int] | None:
        """The parameter in whose place the program uses a tensor from now on, and the line that made it; else None.

        It has to have made new ones of all parameters that have gradients.
        """
        made = self._updated.get(memory_of(x)) if x.requires_grad and x.is_leaf else None
        if made is None or self._known.get(x, _UNKNOWN).leaf:
            return None
        leaves, (number, site) = self.leaves(), made
        given = {self._known[p].id for p in leaves if id(p) in self.made}
        if not given.issubset(of for of, _ in self._updated.values()):
            return None
        return next(((p, site) for p in leaves if self._known[p].id == number and p.shape == x.shape), None)

    def backward_is_over(self) -> None:
        """Look where the gradients are."""
        self.gradients.find()
        for _, p in self.parameters():
            gradient = gradient_of(p)
            if gradient is not None:
                self.made[id(p)] = gradient

    def change_of(self, p: Any, gradient: Tensor | None) -> Moved:
        """What the program made of a parameter's gradient since backward."""
        made = self.made.get(id(p))
        if gradient is None:
            return Moved() if made is None else Moved(changed=Changed("taken away", -1))
        known = self.changes.at_step(gradient, made)
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

    def leaves(self) -> list[Tensor]:
        """The parameters that were met since the last step, but those whose memory was let go of, as FSDP does."""
        return [x for x, known in self._known.items() if known.leaf and (memory_of(x) or not x.numel())]

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters that are known, by name."""
        names = self.modules.names()
        held = {id(leaf): leaf for leaf in self.leaves()} | {id(p): p for p in self.modules.parameters()}
        for key, p in held.items():
            yield names.get(key) or nameless(self.id_of(p)), p

    def was_received(self, x: Tensor) -> bool:
        """Whether another rank sent it."""
        known = self._known.get(x)
        return known is not None and known.received

    def _fresh(self) -> int:
        self._numbers += 1
        return self._numbers

    def _number(self, x: Tensor, active: bool, *, leaf: bool = False) -> int:
        return self._numbered(x, self._fresh(), active, leaf=leaf)

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
            before = known.given.value
            # On the meta device, where a model is made before it is loaded, there is no value.
            if x.shape == before.shape and not x.is_meta and (before.is_meta or not torch.equal(x, before)):
                known.given.value = x.detach().clone()
        known.given = None

    def overwritten(self, x: Tensor) -> None:
        """An operator that is written down writes to a tensor: what parameters there were until then counts."""
        held = self._holder(memory_of(x))
        for each in (x, held, *(y() for y in self._stores.get(_read(x), ()))):
            if each is not None:
                self.used(each)

    def _is_active(self, x: Tensor) -> bool:
        known = self._known.get(x)
        if known is not None:
            return bool(known.active)
        if x.requires_grad:
            return True
        return bool(self.calls) and self.alias(x) is not None

    def alias(self, x: Tensor) -> int | None:
        """Number another view of memory that is known, made without an operator."""
        owner = self._owner(x)
        if owner is None or (owner.is_leaf and not self.calls and not x.requires_grad):
            return None  # `.data` of a parameter
        return self._viewed(x, self._known[owner].id, True)

    def _viewed(self, x: Tensor, of: int, active: bool) -> int:
        number = self._number(x, active)
        part = tuple(x.shape), tuple(x.stride()), int(x.storage_offset())
        self.tape.events.append(Alias(number, of, *part, x.is_complex()))
        return number

    def _owner(self, x: Tensor) -> Tensor | None:
        """A tensor that is followed, or a parameter, whose memory another one shares and reads in the same way.

        The same part of it if there is one, else the largest: gradients pass through what both have.
        """
        if not memory_of(x):
            return None
        there = [each() for each in self._stores.get(_read(x), ())]
        there.append(self._holder(memory_of(x)))
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
            self.alias(x)

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
        was_data = known is not None and not (known.leaf or self.calls) and x.requires_grad and x.is_leaf
        if was_data and (isinstance(x, torch.nn.Parameter) or not self.has_optimizer):
            # Such as a frozen parameter; what a program with an optimizer cuts is none.
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
            number = self.alias(x) if number is None else number
            if number is not None:
                return number
            if x.requires_grad and x.numel():  # where there is nothing, nothing is lost
                return self._lost(x, "where a tensor came from is not known")
        random = self._random.get(x, 0)
        number = self._number(x, False)
        if self.modules.still:
            self.taken[number] = self._still_in((x,))
        self.tape.events.append(ProgramInput(number, x.detach().clone(), random=random))
        return number

    def _still_in(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """The parameters that take no gradient, and buffers, that tensors are, or are made of."""
        still = self.modules.still
        return frozenset[int]().union(
            *({id(x)} if id(x) in still else self._still.get(x) or () for x in tensors)
        )

    def _parameter_at(self, x: Tensor) -> Known | None:
        """What is known of a parameter that autograd hands out as another tensor."""
        held = self._holder(memory_of(x))
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
        lost = ProgramInput(
            number, x.detach().clone(), lost=why, site=self.site(), of=self._older.get(x) or -1
        )
        self.tape.events.append(lost)
        return number

    def _view(self, x: Tensor) -> int | None:
        base = base_of(x)
        known = None if base is None else self._known.get(base)
        return None if known is None else self._viewed(x, known.id, True)

    def target(self, x: Tensor) -> int:
        """The number of a tensor that is about to be written to, with the memory that it is a view of."""
        known = self._known.get(x)
        is_data = known is None or not (known.active or known.leaf or known.spoilt)
        if is_data and (base := base_of(x)) is not None:
            known = self._known.get(base)
            return self._viewed(x, self.ref(base) if known is None else known.id, False)
        return self.ref(x)

    def _holds_gradients(self, x: Tensor) -> None:
        """Something active was written there."""
        for each in (x, base_of(x)):
            known = None if each is None else self._known.get(each)
            if each is not None and known is not None:
                known.active, known.spoilt = True, False
                self._share(each)

    def _at(self, x: Tensor, store: int) -> Known | None:
        """What is known of the parameter in a tensor's memory, of the tensor, or of another that is there."""
        parameter = self._holder(store)
        # FSDP frees the memory of parameters that it keeps, and other tensors get it.
        others = [
            y
            for each in self._stores.get(_read(x), ())
            if (y := each()) is not None and memory_of(y) == store
        ]
        found = (self._known.get(each) for each in (parameter, x, *reversed(others)) if each is not None)
        return next((known for known in found if known is not None), None)

    def _holder(self, store: int) -> Tensor | None:
        """The parameter whose memory this is."""
        held = self._held.get(store, lambda: None)()
        return held if held is not None and memory_of(held) == store else None


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


class Writing:
    """A backward that is running, with the gradients that it was given, and the tape of it."""

    def __init__(self, number: Callable[[], int], met: Sequence[Tensor | None]) -> None:
        self.back = Back([], [None if x is None else x.detach().clone() for x in met], [], [])
        self._next = number
        self._known: Any = WeakTensors()
        self._kept: list[Tensor] = []
        self.back.ins = [None if x is None else self._number(x) for x in met]

    def operate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and write it down where it works on the gradients or on what was made of them."""
        given = list(tensors_in((args, kwargs)))
        if not any(x in self._known for x in given):
            return func(*args, **kwargs)
        if is_random(func):
            self.back.repeats = self.back.repeats and not any(x in self._known for x in tensors_in(args[:1]))
            return func(*args, **kwargs)  # what was drawn is data
        taken = mapped(args, self._ref), mapped(kwargs, self._ref)
        result = func(*args, **kwargs)
        outs = [self._number(x) for x in tensors_in(result)]
        self.back.ops.append(Op(str(func), *taken, outs, -1, None))
        return result

    def ended(self, gave: Sequence[Tensor | None]) -> Back:
        """The tape, with what the backward returned."""
        self.back.gave = [None if x is None else x.detach().clone() for x in gave]
        self.back.outs = [None if x is None else self._ref(x) for x in gave]
        return self.back

    def _number(self, x: Tensor) -> int:
        known: int | None = self._known.get(x)
        if known is None:
            known = self._known[x] = self._next()
            self._kept.append(x)
        return known

    def _ref(self, x: Tensor) -> int:
        known: int | None = self._known.get(x)
        if known is None:
            known = self._number(x)
            self.back.ops.append(ProgramInput(known, x.detach().clone()))
        return known


@dataclass(slots=True)
class Call:
    """A collective or a message before it is made."""

    kind: str  # as `Sent` has it
    # ranks, name: of the group
    ranks: tuple[int, ...]
    name: str
    ins: list[Tensor]  # what is handed in
    outs: list[Tensor] | None  # where the result is written; None where the operator makes it
    # reduce, root, tag, splits, verb: as `Sent` has them
    reduce: str = ""
    root: int = -1
    tag: int = 0
    splits: tuple[list[int], list[int]] | None = None
    verb: Verb | None = None


_KEPT: set[dist.ProcessGroup] = set()
"""Groups that were used, so that none is destroyed. The destructor of one of Gloo's waits for a thread that may want
the GIL, to free what calls kept of torch's dispatch modes. If the last reference is dropped by a thread that holds the
GIL, as where DDP drops it, they wait for each other."""


def call_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """What an operator of torch's namespaces of collectives does; None for one that is not known."""
    name = func.overloadpacket.__name__
    raw = func.namespace == "c10d"
    known = COLLECTIVES[func.namespace].get(name)
    if known is None:
        return None
    kind, takes, writes = known
    bound = arguments(func, args, kwargs)
    if raw:
        group = group_behind(bound["process_group"])
        if group is None:
            return None
        boxed = bound.get("reduce_op")
        reduce = "" if boxed is None else reduction_of(boxed)
    else:
        group = bound["group_name"]
        group = group if isinstance(group, dist.ProcessGroup) else resolve_group(group)
        reduce = bound.get("reduce_op", "")
    _KEPT.add(group)
    ranks, label = tuple(dist.get_process_group_ranks(group)), group.group_name
    call = Call(kind, ranks, label, list(tensors_in(bound.get(takes))), None)
    if writes:
        call.outs = list(tensors_in(bound.get(writes)))
    call.reduce = reduce
    call.root = next((bound[key] for key in ("root_rank", "dst", "src") if key in bound), -1)
    call.tag = bound.get("tag", 0)
    if "output_split_sizes" in bound:
        call.splits = list(bound["output_split_sizes"]), list(bound["input_split_sizes"])
    if raw and call.outs is None:
        call.outs = []
    return call


_DRAWN = 4096
"""How many elements tell what was drawn."""
_CHECKPOINT = torch.utils.checkpoint.__file__
"""What is detached in here is what autograd keeps."""
_PLAIN = {Tensor, torch.nn.Parameter, torch.nn.Buffer}
_OF_PARTS = {"DTensor", "AsyncCollectiveTensor"}
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
_CLIP = torch.nn.utils.clip_grad.__file__
_FSDP = str(Path(torch.distributed.__file__).with_name("fsdp"))
_SCALING = {"mul_", "div_", "_foreach_mul_", "_foreach_div_"}


@dataclass(slots=True)
class PendingEvent:
    """A collective or a message that is under way."""

    event: Sent  # what the tape has of it
    cut: bool  # whether autograd follows what is handed in, and not what comes


class Recorder(Numbering, DispatchMode):
    """Records what this rank's program does while the context is open.

    The log is a file that says of each collective, before it is made, what it is.
    """

    def __init__(self, tape: Tape, modules: Modules, log: Path | None = None) -> None:
        super().__init__(tape, modules)
        self.sends = 0
        """Collectives so far."""
        self.backward = 0
        """Depth of backwards that build no graph."""
        self.stepping = False
        self.summed_in_step = -1
        """The last line inside the current step of an optimizer that sums a tensor over ranks; -1: none does."""
        self.writing: Writing | None = None
        """The backward of a hand-written Function, or the hook, that is running."""
        self.received: tuple[Called, set[int]] | None = None
        """The call whose backward is running, and where the gradients are that it received."""
        self.handles, self.mixing = Handles(tape, self.site), Mixing(self.site)
        self.written_at: dict[int, int] = {}
        """The lines that wrote to memory that no gradient passes through, since the last step."""
        self.written_by_hand: Callable[[Tensor, bool | None], bool] = lambda *_: False
        """Is called when the program is about to write to a tensor itself: `_Watcher.writes_itself`."""
        self.writes_left_over: Callable[[Tensor], None] = lambda _: None
        """Is called when it writes to such a parameter along what is made of gradients: `_Watcher.writes_left_over`."""
        self.renews: Callable[[Tensor, Tensor, int], None] = lambda *_: None
        """Is called when the program goes on with other parameters: `_Watcher.renews`."""
        self._cut: Any = WeakTensors()
        """Made where gradients are off of tensors that autograd follows: whether of what other ranks sent of them."""
        self._came: Any = WeakTensors()
        """Made of what collectives brought, before any backward."""
        self._awaited: Any = WeakTensors()
        """Results that Gloo copies to their place when the program waits for them."""
        self._totals: list[tuple[Sent, weakref.ref[Tensor]]] = []
        self._handed: list[tuple[Sent, list[Tensor]]] | None = []
        """What broadcasts and sums take before the first backward, whose memory is not used again until then."""
        self._log = log.open("w", buffering=1) if log else None
        self._sees_redistributions, self._namespaces = False, namespaces()
        self.namespaces = tuple(f"{each}_" for each in self._namespaces)
        """What the names of operators begin with, in the names of Functions, that the script has not registered."""

    # -- what torch calls ----------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and write it down where gradients pass through."""
        kwargs = kwargs or {}
        if self.quiet:
            return func(*args, **kwargs)
        if self.handles.pending and func.namespace not in ("c10d", "_c10d_functional"):
            self.handles.used([x for x in tensors_in((args, kwargs)) if type(x) in _PLAIN])
        if not _PLAIN.issuperset(types):
            if not any(each.__name__ in _OF_PARTS for each in types):
                return func(*args, **kwargs)  # a fake tensor's
            self.see_parts(args, kwargs)
            return NotImplemented  # what it does to its plain parts comes by itself
        if func.namespace in ("c10d", "_c10d_functional"):
            return self._collective(func, args, kwargs)
        if (
            func.namespace not in self._namespaces
        ):  # the process that runs it again does not have the operator
            given = list(tensors_in((args, kwargs)))
            if given and all(x.is_cpu and x.layout is torch.strided and not x.is_quantized for x in given):
                with self:
                    return run_kernel(func, args, kwargs)
        if self.stepping:
            return self.mixing.follow(func, args, kwargs)
        if self.received is not None and written(func):
            bound = arguments(func, args, kwargs)
            if any(
                address_of(x) in self.received[1] for key in written(func) for x in tensors_in(bound.get(key))
            ):
                self.received[0].overwrote = self.site()
        if self.writing is not None:
            return self.writing.operate(func, args, kwargs)
        if self._awaited and self._arrives(func, args):
            return func(*args, **kwargs)
        if not self._follows() or self._is_about_gradients(func, args):
            if self._is_cut(func, args, kwargs):
                return self._record(func, args, kwargs)
            return self._apart(func, args, kwargs)
        given = list(tensors_in((args, kwargs)))
        name = func.overloadpacket.__name__
        if name == "detach" and (
            given[0] in self._kept or sys._getframe(1).f_code.co_filename == _CHECKPOINT
        ):
            result = func(*args, **kwargs)
            self.taken_back(given[0], result)
            return result
        draws = _draws(func, args, kwargs) and not written(func) and name != "native_dropout"
        # These take no more of their operand than what it looks like: a mask is filled at random later.
        makes = name.endswith("_like") or name.startswith("new_")
        if draws or makes or not any(self._is_active(x) for x in given):
            return self._apart(func, args, kwargs)  # what was drawn cannot be drawn again: it is data
        if self.roots and self._is_step(func, args, kwargs):
            return self._apart(func, args, kwargs)
        if self._updated:
            for x in given:
                if (renewed := self.renewed(x)) is not None:
                    self.renews(x, *renewed)
        return self._record(func, args, kwargs)

    def backward_begins(self) -> None:
        """A backward begins: before the first one, the parameters that were sent are named."""
        super().backward_begins()
        if self._handed is not None:
            names = {address_of(p): name for name, p in self.parameters()}
            for event, given in self._handed:
                event.parameters = [names[at] for at in map(address_of, given) if at in names]
            self._handed = None

    def writes_back(self, met: Sequence[Tensor | None]) -> Writing | None:
        """A backward or a hook begins, which is written down; None inside of another one."""
        if self.writing is not None:
            return None
        self.writing = Writing(self._fresh, met)
        return self.writing

    def wrote_back(self, writing: Writing | None, gave: Sequence[Tensor | None]) -> Back | None:
        """It is over: what it did, None where that is not known."""
        if writing is None or writing is not self.writing:
            return None
        self.writing = None
        return writing.ended(gave)

    def _arrives(self, func: Any, args: Any) -> bool:
        """Whether an operator is the end of a collective, which was written down when it began."""
        if func.overloadpacket.__name__ != "copy_" or args[0] not in self._awaited or args[1] in self._known:
            return False
        del self._awaited[args[0]]
        return True

    def _is_step(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operator writes to a parameter, through `.data`: autograd refuses any other way."""
        bound = arguments(func, args, kwargs) if written(func) else {}
        targets = (x for key in written(func) for x in tensors_in(bound.get(key)))
        return any((known := self._at(x, memory_of(x))) is not None and known.leaf for x in targets)

    def _follows(self) -> bool:
        return (bool(self.calls) or torch.is_grad_enabled()) and not self.backward and not self.stepping

    def _is_cut(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operator takes what was cut, or cuts: it takes entries of what autograd follows, maybe to send."""
        if self.backward or self.stepping:
            return False
        moves = func.overloadpacket.__name__ in _TAKES and not self.roots
        return any(
            x in self._cut or (moves and x.grad_fn is not None and self._is_active(x))
            for x in tensors_in((args, kwargs))
        )

    def _is_about_gradients(self, func: Any, args: Any) -> bool:
        """Whether an operator works on gradients, with gradients followed though they are not meant to be."""
        if not self.roots or self.calls:
            return bool(written(func)) and any(self.gradients.name_at(x) for x in tensors_in(args[:1]))
        given = list(tensors_in(args))
        return any(self.changes.of(x) is not None for x in given) and not any(x.requires_grad for x in given)

    def see_parts(self, args: Any, kwargs: Any) -> None:
        """Take this rank's part of a DTensor that is a parameter for the parameter."""
        if not self._sees_redistributions:
            self._sees_redistributions = True
            self._watch_redistributions()
        for x in tensors_in((args, kwargs)):
            local: Any = None if type(x) is Tensor else local_part(x)
            leaf = x.requires_grad and x.is_leaf and type(local) is Tensor
            if leaf and self._follows() and not (local in self._known and self._known[local].leaf):
                self._leaf(local, self.modules.name_of(x))

    def _watch_redistributions(self) -> None:
        """Count from now on what DTensor redistributes by itself, where that communicates."""
        observer = redistribution_observer(None)
        if observer is None:
            return
        original = observer.observe_redistribution

        def observe(_: Any, before: Any, after: Any, *words: Any, **named: Any) -> Any:
            pairs = list(zip(before.placements, after.placements, strict=True))
            if not self.quiet and any(old != new and not old.is_replicate() for old, new in pairs):
                found = re.search(r"\b\w+\.\w+", " ".join(map(str, (*words, *named.values()))))
                operator = (found[0] if found else "an operator") + ", backward" * bool(self.backward)
                old, new = (" ".join(map(str, each)) for each in zip(*pairs, strict=True))
                size = math.prod(before.tensor_meta.shape) * before.tensor_meta.dtype.itemsize
                self.tape.redistributions[(self.site(), operator, old, new, size)] += 1
            return original(before, after, *words, **named)

        observer.observe_redistribution = classmethod(observe)

    def _apart(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator that no gradient passes through."""
        targets = written(func)
        if targets and not self.backward and not self.stepping:
            self._see_writing(func, args, kwargs, targets)
        draws = _draws(func, args, kwargs)
        given = tensors_in((args, kwargs)) if self._random else ()
        drawn = {self._random[x] for x in given if x in self._random}
        still = self._still_in(tensors_in((args, kwargs))) if self.modules.still else frozenset[int]()
        if (self.roots or self.left_over) and not self.backward and not self.stepping:
            result = self.changes.follow(func, args, kwargs, lambda: func(*args, **kwargs))
            if self.roots:
                self.updates(func, list(tensors_in((args, kwargs))), result)
        else:
            result = func(*args, **kwargs)
        given = tensors_in((args, kwargs)) if self._came and not self._trains() else ()
        came = any(x in self._came for x in given)
        for x in tensors_in(result) if draws or drawn or still or came else ():
            if draws:
                self._random[x] = _number_of_draw(x)
            elif drawn:
                self._random[x] = hash(frozenset(drawn)) if len(drawn) > 1 else min(drawn)
            if came:
                self._came[x] = True
            if still and id(x) not in self.modules.still:
                self._still[x] = still
        return result

    def _see_writing(self, func: Any, args: Any, kwargs: Any, targets: frozenset[str]) -> None:
        if func.namespace == "fsdp":  # it fills parameters that it has let go of, which is not a step
            return
        bound = arguments(func, args, kwargs)
        for name in targets:
            for x in tensors_in(bound.get(name)):
                store = memory_of(x)
                if self.gradients.part_of(x) is not None:
                    return  # it becomes a note
                if self.gradients.name_at(x):
                    operator = func.overloadpacket.__name__
                    if operator in _SCALING:
                        self._scaled(bound, name, inverse="div" in operator)
                    elif operator == _UNSCALE and name == "self":
                        for of in filter(None, map(self.gradients.name_at, tensors_in(bound[name]))):
                            factor = float(bound["inv_scale"])
                            self.tape.events.append(Scaled(of, factor, self.site(), loss=True))
                    return
                known = self._at(x, store)
                operands = [y for key, value in bound.items() if key != name for y in tensors_in(value)]
                if self.writes(x, operands):
                    return
                if known is not None and known.active and not known.leaf:
                    known.spoilt = True
                if known is None and x.is_floating_point():
                    self.written_at[address_of(x)] = self.site()

    def writes(self, x: Tensor, operands: Sequence[Tensor]) -> bool:
        """The program is about to write to a tensor, maybe to a parameter: whether that is a step of its own."""
        if address_of(x) in self.left_over and any(self.changes.of(y) is not None for y in operands):
            self.writes_left_over(x)
            return True
        known = self._at(x, memory_of(x))
        new = known is not None and known.leaf and bool(self.roots)
        if self.written_by_hand(x, self._is_of_gradient(x, operands) if new else None):
            return True
        p = None if self._trains() else self.modules.at.get(address_of(x), lambda: None)()
        if p is not None and p.shape == x.shape and p.numel():
            came = any(y in self._came for y in operands)
            with self.unseen():
                name, value = self.modules.names().get(id(p), ""), p.detach().clone()
            self.tape.written.append(
                Written(self.modules.registered[p], name, value, self.site(), self.sends, came)
            )
        return False

    def _trains(self) -> bool:
        """Whether the program has run a backward."""
        return bool(self.roots or self.tape.steps)

    def _is_of_gradient(self, x: Tensor, operands: Sequence[Tensor]) -> bool:
        """Whether what a parameter moves by, or becomes, comes from its gradient alone."""
        held = self._holder(memory_of(x))
        gradient = None if held is None else gradient_of(held)
        if gradient is None:
            return False
        with self.unseen(), torch.no_grad():
            return any(
                is_multiple(way, gradient)
                for y in operands
                if y.numel() == x.numel() == gradient.numel()
                for way in (y, y.reshape(x.shape) - x)
            )

    def _scaled(self, bound: dict[str, Any], name: str, *, inverse: bool) -> None:
        gradients = list(tensors_in(bound[name]))
        others = [value for key, value in bound.items() if key != name][:1]
        factors = others[0] if others and isinstance(others[0], (list, tuple)) else others * len(gradients)
        for gradient, factor in zip(gradients, factors, strict=False):
            number = factor.item() if isinstance(factor, Tensor) and factor.numel() == 1 else factor
            of = self.gradients.name_at(gradient)
            if of is not None and isinstance(number, (int, float)) and (number or not inverse):
                made = isinstance(factor, Tensor) and self.changes.of(factor) is not None
                own, by = made or self.changes.read, "clip_grad_norm_" if _is_within(_CLIP) else ""
                value = 1 / number if inverse else float(number)
                self.tape.events.append(Scaled(of, value, self.site(), own or bool(by), by=by))

    # -- operators -----------------------------------------------------------------------------------------------

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = str(func)
        targets = written(func)
        bound = arguments(func, args, kwargs) if targets else {}
        written_to = [x for key in targets for x in tensors_in(bound.get(key))]
        for x in written_to:
            self.target(x)
            self.overwritten(x)
        taken = mapped(args, self.ref), mapped(kwargs, self.ref)
        if name != "aten.detach.default":
            for x in tensors_in((args, kwargs)):
                self.used(x)
        event = Op(name, *taken, [], self.site(), self.calls[-1].number if self.calls else None)
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__ == "native_dropout":
            # A product, with a mask that does not have to be drawn again.
            made, mask = result
            scale = mask.to(made.dtype) / (1 - args[1]) if args[2] else torch.ones_like(made)
            factor = Ref(self._fresh())
            self.tape.events.append(ProgramInput(factor.id, scale, random=_number_of_draw(mask)))
            outs = [self._number(made, True)]
            product = (event.args[0], factor)
            self.tape.events.append(Op("aten.mul.Tensor", product, {}, outs, event.site, event.call))
            return result
        self.tape.events.append(event)
        drawn = _draws(func, args, kwargs)
        for x in tensors_in(result):
            known = self._known.get(x)
            event.outs.append(
                known.id if known is not None else self._number(x, x.is_floating_point() or x.is_complex())
            )
            if drawn:
                self._random[x] = _number_of_draw(x)
            if not self._follows():
                self._cut[x] = not any(
                    y.grad_fn is not None or self._cut.get(y) is False for y in tensors_in((args, kwargs))
                )
        for x in written_to:
            self._holds_gradients(x)
        if self.roots:
            self.updates(func, list(tensors_in((args, kwargs))), result)
        return result

    # -- collectives ---------------------------------------------------------------------------------------------

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = call_of(func, args, kwargs)
        if call is None:
            return self._waited(func, args, kwargs)
        pending = self.begins(call)
        if pending.event.followed:
            pending.event.outs = [self.target(x) for x in call.outs or ()]
        result = func(*args, **kwargs)
        if not pending.event.followed and not self.backward:
            outs = list(tensors_in(result)) if call.outs is None else call.outs
            if self.roots or self.left_over:
                self.changes.arrives(outs)
            self._came.update(dict.fromkeys(outs, True))
        self.tape.events.append(pending.event)
        if pending.event.followed:
            made = list(tensors_in(result)) if call.outs is None else call.outs
            if call.outs is None:
                pending.event.outs = [self._number(x, True) for x in made]
            if func.namespace == "c10d" and call.kind == "reduce_scatter":
                for x in made:
                    self._awaited[x] = True
            self.came(pending, made)
        elif call.kind == "all_reduce" and call.reduce == "sum" and len(call.ins) == 1:
            self._remember(pending.event, call.ins[0])
        return result

    def begins(self, call: Call, *, may_follow: bool = True) -> PendingEvent:
        """Say that a call is about to be made, which maybe cannot be run again, and take down what is handed in."""
        self.sends += 1
        message = call.kind in ("send", "recv")
        grads = torch.is_grad_enabled() or bool(self.calls)
        gradients = any(self.gradients.name_at(x) or (self.roots and self.changes.of(x)) for x in call.ins)
        apart = call.kind == "barrier" or gradients or self.backward or self.stepping
        # What autograd follows, sent where gradients are off: they are cut there, on purpose or not.
        cut = not grads and any(x.requires_grad or x in self._cut for x in call.ins)
        followed = may_follow and not apart and (grads or message or cut)
        for x in call.outs or ():
            if x.requires_grad and x.is_leaf and call.kind != "recv":  # a parameter is given its value
                followed = False
                self._known.pop(x, None)
        phase = "backward" if self.backward else "forward" if followed else "apart"
        site = self.site()
        event = Sent(call.kind, call.ranks, call.name, [], [], site, self._in_call(), phase=phase)
        event.reduce, event.root, event.tag, event.splits = call.reduce, call.root, call.tag, call.splits
        event.verb = call.verb
        event.shapes = [tuple(x.shape) for x in call.ins or call.outs or []]
        event.gradients = [self.gradients.name_at(x) or "" for x in call.ins]
        event.rounded = any(x.dtype.itemsize <= 2 for x in call.ins)
        if phase != "backward" and call.reduce == "sum" and [x.numel() for x in call.ins] == [1]:
            event.given = None if call.ins[0].is_meta or is_fake(call.ins[0]) else float(call.ins[0].real)
        event.followed = followed and all(
            x.is_floating_point() or x.is_complex() for x in (*call.ins, *(call.outs or ()))
        )
        event.hidden = (
            followed
            and not self.calls
            and any(x.requires_grad or self._cut.get(x) is False for x in call.ins)
        )
        if self._log is not None:
            place = self.tape.places[site] if site >= 0 else None
            kind = f"gm.{call.kind}" if call.verb else call.kind
            self._log.write(f"{kind}\t{call.name}\t{call.ranks}\t{event.shapes}\t{call.root}\t{place}\n")
        if self.stepping and call.reduce and any(x.numel() > 1 for x in call.ins):
            self.summed_in_step = site
        self._see_overwriting(call, site)
        if self._handed is not None and call.kind in ("broadcast", "all_reduce"):
            self._handed.append((event, [x for x in call.ins or call.outs or () if x.is_leaf]))
        elif call.kind in ("broadcast", "all_reduce") and not (gradients or self.backward):
            buffers = {address_of(x): name for name, x in self.modules.buffers().items()}
            event.buffers = [
                buffers[at] for at in map(address_of, call.ins or call.outs or ()) if at in buffers
            ]
        if event.followed:
            event.ins = [self.ref(x) for x in call.ins]
        return PendingEvent(event, cut)

    def came(self, pending: PendingEvent, made: Sequence[Tensor]) -> None:
        """Say what a followed call wrote to, or made, all of which has its number."""
        for x in made:
            self._holds_gradients(x)
            if pending.cut:
                self._cut[x] = True
            self._known[x].received = pending.event.kind == "recv"

    def begins_verb(self, call: Call, *, may_follow: bool) -> PendingEvent:
        """Say that one of the library's own calls is about to be made, which makes one tensor, and take it down."""
        pending = self.begins(call, may_follow=may_follow)
        pending.event.hidden = False
        if pending.event.followed:
            pending.event.outs = [self._fresh()]
        self.tape.events.append(pending.event)
        return pending

    def made_verb(self, pending: PendingEvent, y: Tensor) -> None:
        """Say what came of it, maybe in another thread and later."""
        if pending.event.followed:
            self._numbered(y, pending.event.outs[0], True)
            self.came(pending, [y])

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
            for old, new in zip(tensors_in(args), tensors_in(result), strict=False):
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

    def _see_overwriting(self, call: Call, site: int) -> None:
        for x in call.outs or ():
            kept = self.saved.get(memory_of(x))
            saved = None if kept is None else kept()
            # FSDP lets go of parameters that autograd has saved, and gathers these, or others, at the same address.
            if saved is not None and memory_of(saved) == memory_of(x) and not _is_within(_FSDP):
                self.tape.events.append(Saved(call.kind, site, site))


_TAKES = MOVES - {"detach"} | {"index", "index_select", "cat", "stack"}
"""Operators that take entries of their operands as they are, to send them say."""


def _is_within(path: str) -> bool:
    """Whether code of a file, or of the files of a folder, is what runs."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(path):
            return True
        frame = frame.f_back
    return False


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator's result is random: attention is not, where it drops nothing."""
    if not is_random(func):
        return False
    bound = arguments(func, args, kwargs)
    may_drop = any(name == "dropout_p" for name, _ in arguments_of(func))
    return not may_drop or bound.get("dropout_p", 0.0) != 0.0


def _number_of_draw(x: Tensor) -> int:
    """A number, not 0, for what was drawn, by its first elements; the same in every process."""
    if x.device.type != "cpu" or x.layout is not torch.strided or is_fake(x):
        return 1
    return 2 + zlib.crc32(bytes(bytes_of(x.detach().flatten()[:_DRAWN].contiguous()).tolist()))


class Verbs(Instrument):
    """What the library asks at each of its calls; the recorder writes them down."""

    plain = True

    def __init__(self, recorder: Recorder) -> None:
        self._to = recorder
        self._begun: dict[int, PendingEvent] = {}
        """Calls that another thread makes, by what autograd remembers of them."""

    def queued(self, op: LibraryOp, x: Tensor, recorded: Any) -> None:
        """Write down a call that another thread is about to make."""
        if not self._to.quiet and not is_fake(x):
            self._begun[id(recorded)] = self._write(op, x)

    def called(self, op: LibraryOp, x: Tensor, recorded: Any, run: Callable[[], Tensor]) -> Tensor:
        """Run an op of the library, and write it down."""
        if current_job() is not None:  # what is recorded of a thread is that of the program's own
            y = run()
            pending = self._begun.pop(id(recorded), None)
            if pending is not None:
                self._to.made_verb(pending, y)
            return y
        if self._to.quiet or is_fake(x):
            return run()
        if functorch_active():  # another process could not read such a tensor
            self._to.tape.events.append(
                Lost(f"{op.verb} inside of a transform of torch.func", self._to.site())
            )
            with self._to.unseen():
                return run()
        pending = self._write(op, x)
        with self._to.unseen():
            y = run()
        self._to.made_verb(pending, y)
        return y

    def declared(self, x: Tensor, axis: Axis, kind: Type) -> None:
        """Remember of a loss that its ranks' are the terms of a sum."""
        number = self._to.id_of(x)
        if kind is Type.V and number is not None and not self._to.quiet:
            self._to.tape.events.append(Term(number, tuple(axis.global_ranks)))

    def _write(self, op: LibraryOp, x: Tensor) -> PendingEvent:
        alone = op.axis.size == 1 or not (op.sends or isinstance(op, Send | Receive))
        ranks = (self._to.tape.rank,) if alone else tuple(op.axis.global_ranks)
        call = Call(op.verb, ranks, f"gradmesh {op.axis.name}", [x], None)
        call.reduce = "max" if isinstance(op, Extremum) else "avg" if isinstance(op, Mean) else "sum"
        if isinstance(op, Send | Receive):
            call.root = op.peer
            if isinstance(op, Receive):
                call.ins = []
        followed = torch.is_grad_enabled() or bool(self._to.calls)  # else it is stopped on purpose
        rounds = op.comm_dtype is not None or op.backward_dtype is not None
        code = encode(op)
        call.verb = Verb(
            code.words, code.numbers, list(map(_readable, code.tensors)), op.axis.rank, op.axis.size
        )
        pending = self._to.begins_verb(call, may_follow=followed and not rounds)
        if rounds and followed and pending.event.phase == "apart":
            self._to.tape.events.append(Lost(f"{op.verb} rounds what travels", pending.event.site))
        return pending


def _readable(x: Tensor) -> Tensor:
    """An index as another process can read it: not what a transform of torch.func has left of one."""
    try:
        x.untyped_storage()
    except NotImplementedError:
        return torch.tensor(x.tolist(), dtype=x.dtype)
    return x
