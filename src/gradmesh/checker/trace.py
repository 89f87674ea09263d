"""The tape: what one rank's program did, in order, as plain values that another process can read."""

from __future__ import annotations

import re
import resource
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)

from gradmesh._torch.operators import WeakTensors, arguments, local_part, written
from gradmesh._util.structure import tensors_in
from gradmesh.checker.findings import Place
from gradmesh.type_inference.tracker import memory_of


@dataclass(slots=True)
class Ref:
    """A tensor of the tape, by its number, where an operator takes one."""

    id: int


@dataclass(slots=True)
class ProgramInput:
    """A tensor that no recorded operator made: a parameter, data, what was computed without gradients."""

    id: int  # its number
    value: Tensor  # a copy
    leaf: bool = False  # whether autograd accumulates a gradient for it
    name: str = ""  # of the parameter, as its module calls it; "" for what has none
    random: int = 0  # a number for what was drawn at random for it, the same where that is; 0: nothing
    # why it is not known where it came from, though autograd follows it; "" where that is known
    lost: str = ""
    site: int = -1  # of the line that took it, where it is lost
    of: int = -1  # its number before the last step, where it was made before that; else -1


@dataclass(slots=True)
class Alias:
    """Another view of a tensor's memory that no recorded operator made; as complex numbers, or as their parts."""

    id: int
    of: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_complex: bool = False

    def view(self, of: Tensor) -> Tensor:
        """The view of that tensor."""
        if of.is_complex() == self.is_complex:
            return of.as_strided(self.shape, self.stride, self.offset)
        if of.is_complex():
            return torch.view_as_real(of).as_strided(self.shape, self.stride, self.offset)
        parts = [2 * stride for stride in self.stride]
        return torch.view_as_complex(of.as_strided((*self.shape, 2), (*parts, 1), 2 * self.offset))


@dataclass(slots=True)
class Op:
    """An operator that gradients pass through; inside of a hand-written Function's forward too."""

    name: str  # as "aten.mul.Tensor"
    # args, kwargs: with a `Ref` for each tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # the numbers of the results' tensors, in order; that of an operand where it was written in place
    outs: list[int]
    site: int  # of the line, in the tape's `places`
    call: int | None  # which call of a Function it is in

    @property
    def base(self) -> str:
        """The name without its namespace and overload, as "mul"."""
        return self.name.split(".")[1]


@dataclass(slots=True)
class Verb:
    """The op of one of the library's own calls, as `gradmesh.autograd.traced` has it."""

    # words, numbers, tensors: what it is made of
    words: str
    numbers: list[int]
    tensors: list[Tensor]
    # rank, size: of the axis
    rank: int
    size: int


@dataclass(slots=True)
class Sent:
    """A collective, or a message."""

    # "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send",
    # "recv", "barrier"
    kind: str
    group: tuple[int, ...]  # its global ranks
    name: str  # what the ranks call it
    # ins, outs: numbers of what is handed in and of what is written, or made
    ins: list[int]
    outs: list[int]
    site: int
    call: int | None
    reduce: str = ""  # how ranks are combined, in lower case; "" where they are not
    root: int = -1  # the rank of the group, or the peer of a message
    tag: int = 0  # of a message
    splits: tuple[list[int], list[int]] | None = None  # rows to and from each rank of a flat all-to-all
    # of what is handed in, for those whose gradients are not followed too
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    rounded: bool = False  # whether that has 16 bits or fewer
    followed: bool = False  # whether the numbers are there, so that it can be run again
    hidden: bool = False  # whether autograd follows an operand and knows nothing of the call
    phase: str = "forward"  # "forward", "backward", or "apart" (no gradients are followed)
    given: float | None = None  # what was handed in to a sum of one number; None for anything else
    total: float | None = None  # what a sum of one number came to, where it cannot be run again
    # where it is one of the library's own calls, by all ranks of `group`, or by this one alone where nothing is sent
    verb: Verb | None = None
    # the names of parameters that a broadcast or a sum before the first backward takes, or writes
    parameters: list[str] = field(default_factory=list)
    # the names of buffers that a broadcast or a sum takes, or writes
    buffers: list[str] = field(default_factory=list)
    # the names of the parameters whose gradients are handed in; "" for anything else
    gradients: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Back:
    """What a backward, or a hook, that sends nothing made of the gradients that it met."""

    # its operators on these and on what was made of them, and the data that they took
    ops: list[Op | ProgramInput]
    # met, gave: copies of the gradients that it was given and that it returned
    met: list[Tensor | None]
    gave: list[Tensor | None]
    outs: list[int | None]
    # ins, outs: their numbers, which are of this tape alone
    ins: list[int | None] = field(default_factory=list)
    repeats: bool = True  # whether it can be run again: nothing of it was drawn at random in place


@dataclass(slots=True)
class Called:
    """A call of a hand-written Function that is over, and what its backward did when that ran."""

    number: int  # which call
    name: str  # of the class
    site: int  # where it was called
    # ins, outs: numbers of its tensors; None for one that the tape does not know
    ins: list[int | None]
    outs: list[int | None]
    begin: int  # how many events there were before it
    sends: bool = False  # whether a collective is in its forward
    sends_back: bool = False  # whether one is in its backward
    # received, returned: the gradients of its results that backward met, and those of its operands that it gave; None
    # until it ran
    received: list[Tensor | None] | None = None
    returned: list[Tensor | None] | None = None
    ours: bool = False  # whether it is of torch itself or of gradmesh
    invariant: bool = False  # whether it is a verb whose result is said to be of type I
    back: Back | None = None  # what its backward did, where it sent nothing
    # the line at which its backward changed a gradient that it received in place; -1 for none
    overwrote: int = -1


@dataclass(slots=True)
class Over:
    """A call of a hand-written Function is over: from here on its results stand for it."""

    call: Called  # which
    unseen: bool = False  # whether a result is of work that was not seen


@dataclass(slots=True)
class Hooked:
    """A hook of a tensor changed its gradient, or sent something."""

    id: int  # the tensor's number
    back: Back | None  # what the hook did; None: it called a collective
    site: int  # of the line that registered it


@dataclass(slots=True)
class Root:
    """A tensor that a backward began at."""

    id: int  # its number
    value: Tensor  # a copy, to hold what is run again against
    weight: Tensor | None  # the gradient that it was given
    passed_on: bool  # whether that came from another rank, which has the loss
    site: int
    # the parameters, by name, where the rank has not stepped
    held: dict[str, Tensor] = field(default_factory=dict)
    # known where the step was judged:
    copies: tuple[int, ...] = ()  # the ranks that have the same loss
    counts: frozenset[int] = frozenset()  # how many labels there are, where these ranks have the same ones
    mean: int = 0  # over how many entries it is a mean; 0: none


@dataclass(slots=True)
class Term:
    """A loss that `gradmesh.objective` made: its ranks' losses are terms of one, and have its value all of them."""

    id: int  # its number
    group: tuple[int, ...]  # the ranks


SUMMED_IN_STEP = "a sum over ranks in the optimizer's step"
"""What an optimizer of the program does, to gradients or to what is made of them, where other code cannot see it."""


@dataclass(frozen=True, slots=True)
class Changed:
    """What a program did to a gradient before the step, other than to multiply it or to add gradients up."""

    # the operator; "replaced" where it is not known what the gradient is made of, "taken away" where there is none any
    # more
    what: str
    site: int  # of the line
    before: Tensor | None = None  # what it was done to, where that is one tensor


@dataclass(slots=True)
class Settings:
    """The numbers that an optimizer steps a group of parameters with."""

    numbers: dict[str, tuple[float, ...]]  # by the setting's name, such as "lr" and "betas"
    made: int  # the line that made the optimizer
    scheduled: int = -1  # the line of the last step of a scheduler of it; -1 where there was none


@dataclass(slots=True)
class Plateau:
    """A `ReduceLROnPlateau`."""

    optimizer: int  # the number of its optimizer
    made: int  # the line that made it
    # the values that it was given, each with the line
    given: list[tuple[float, int]] = field(default_factory=list)


@dataclass(slots=True)
class Epoch:
    """What a `DistributedSampler` gives its rank, from one `iter` of it to the next."""

    sampler: int  # its number, as they are first used
    site: int  # of the line
    size: int  # of the data set that `indices` count in, behind `Subset`s
    # replicas, rank, shuffle: as it has them
    replicas: int
    rank: int
    shuffle: bool
    is_set: bool  # whether `set_epoch` was called before
    seed: tuple[int, int]  # what its order depends on, with the epoch
    padding: int  # how many samples it repeats, so that all ranks have as many
    indices: list[int]


@dataclass(slots=True)
class Annotation:
    """A tensor was given types with `spmd_types.assert_type`."""

    site: int  # the line
    types: dict[tuple[int, ...], str]  # "R", "I", "V" or "P", by the ranks of the axis
    # value, gradient: of the tensor then, unless it was overwritten, and the first one that came to it in a backward
    value: Tensor | None
    gradient: Tensor | None = None
    of: Tensor | None = None  # the tensor, while the program runs


@dataclass(slots=True)
class Unwaited:
    """The result of an asynchronous call was used before the call was waited for."""

    kind: str  # of the call
    # started, used: the lines
    started: int
    used: int
    subject: str  # the parameter whose gradient it is, where a step used it; else ""


@dataclass(slots=True)
class Param:
    """A parameter at an optimizer step."""

    name: str  # as its module calls it
    id: int | None  # of the leaf of this rank's tape; None where it was not used
    # value, grad: copies, before the step; of this rank's part
    value: Tensor
    grad: Tensor | None
    after: Tensor | None = None  # the value after the step
    mesh: Any = None  # the global ranks of a DTensor's mesh, nested as that is; None for a plain tensor
    # of a DTensor: ("shard", dim), ("replicate", 0) or ("partial", 0) for each mesh dim
    placements: list[tuple[str, int]] = field(default_factory=list)
    grad_placements: list[tuple[str, int]] = field(default_factory=list)  # those of its gradient
    whole: tuple[int, ...] = ()  # the DTensor's whole shape
    factor: float = 1.0  # what the gradient was multiplied by in another tensor than its own
    share: float = 1.0  # the same, where it may be that of a mean over ranks
    changed: Changed | None = None  # what else was done to it
    settings: Settings | None = None  # of the optimizer; None where the program steps by itself
    copied: bool = False  # whether the program steps it by itself, and another parameter has the same value


@dataclass(slots=True)
class Step:
    """What an optimizer's step, or the program's own writing to its parameters, begins with."""

    params: list[Param]
    buffers: dict[str, Tensor]
    site: int
    manual: bool = False
    # the ranks of a DistributedDataParallel whose gradients are averaged; () without one
    wrapped: tuple[int, ...] = ()
    # whether parameters move along what is in their `.grad`, as far as the first of them tells
    by_gradients: bool = True
    optimizer: int = -1  # the number of the optimizer; -1 for a step of the program's own
    # the lines at which the program last wrote to buffers and frozen parameters
    written: dict[str, int] = field(default_factory=dict)
    frozen: dict[str, Tensor] = field(default_factory=dict)  # copies of the parameters that take no gradient
    # the frozen parameters and buffers that operators which gradients pass through used, with what these took
    taken: dict[str, list[int]] = field(default_factory=dict)
    # whether layers that do something else in evaluation were in training in any call for gradients
    modes: dict[str, bool] = field(default_factory=dict)
    # parameters whose entries the step mixes without a collective, with the operator that does it and its line
    mixed: dict[str, tuple[str, int]] = field(default_factory=dict)
    # whether the program writes what an optimizer's step has left, along what is made of gradients
    left_over: bool = False
    # the line that last computed a derivative by a transform of torch.func, where no backward was run
    transformed: int = -1


@dataclass(slots=True)
class Scaled:
    """A parameter's gradient was multiplied by a number between backward and step."""

    name: str  # of the parameter
    factor: float  # the number
    site: int
    own: bool = False  # whether it was made of gradients, such as of their norm, as far as is known
    loss: bool = False  # whether it takes the scale of the loss back
    by: str = ""  # "clip_grad_norm_" where that is torch's own, which did it


@dataclass(slots=True)
class Saved:
    """A collective wrote where autograd has saved a tensor for its backward."""

    kind: str
    site: int
    where: int


@dataclass(slots=True)
class Lost:
    """Something that could not be followed, in words."""

    what: str
    site: int


@dataclass(slots=True)
class Written:
    """The program is about to write to a parameter itself, and has run no backward so far."""

    number: int  # of the parameter, as modules got them
    name: str  # of it; "" as long as its module was not called
    value: Tensor  # before
    site: int  # of the line
    calls: int  # how many collectives there were before
    of_received: bool  # whether what it becomes is made of what came from other ranks


Event = ProgramInput | Alias | Op | Sent | Root | Term | Step | Scaled | Saved | Lost | Over | Hooked


@dataclass
class Tape:
    """All of it."""

    # rank, size: of the rank
    rank: int
    size: int
    events: list[Event] = field(default_factory=list)  # in order
    calls: dict[int, Called] = field(default_factory=dict)  # of Functions, by number
    # the line that registered a communication hook with DistributedDataParallel; -1 where there is none
    comm_hook: int = -1
    compresses: bool = False  # whether that hook is none of those of torch that sum and average
    annotations: list[Annotation] = field(default_factory=list)  # of tensors, in order
    # the schedulers that lower a learning rate where a value stops to fall
    plateaus: list[Plateau] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)  # of the samplers, in order
    # what the program writes to parameters before any backward
    written: list[Written] = field(default_factory=list)
    # results of asynchronous calls that were used too early
    unwaited: list[Unwaited] = field(default_factory=list)
    # what stands before the names of parameters, where several modules were called
    labels: set[str] = field(default_factory=set)
    places: list[Place] = field(default_factory=list)  # the lines that `site` numbers
    steps: int = 0  # how many optimizer steps were seen
    ended: str = "returned"  # "stopped" after the steps asked for, "returned", or "raised"
    error: str = ""  # the traceback, where it raised
    raised_at: int = -1  # the line of the program that raised
    # the parameters for whose gradients DDP waits in vain, where that is the error
    not_used: tuple[str, ...] = ()
    seconds: float = 0.0  # how long the program ran
    memory: int = 0  # the most bytes that the rank held
    # how often DTensor redistributed an operand by itself, by line, operator, placements before and after, and bytes of
    # the whole tensor
    redistributions: Counter[tuple[int, str, str, str, int]] = field(default_factory=Counter)


@dataclass
class Recording:
    """What a script's ranks left."""

    tapes: list[Tape | None]  # of the ranks that ended; None for one that did not
    calls: list[list[str]]  # what each rank's collectives were, line by line, also where it did not end
    output: list[str]  # what each printed
    stuck: bool  # whether they were ended because nothing happened any more
    killed: dict[int, int]  # the signals that killed ranks, by rank
    seconds: float  # how long the ranks ran


def most_memory() -> int:
    """The most bytes that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


_NUMBER = re.compile(r"(\d+)\.$")
"""What ends a label."""


def label_stepped(tape: Tape) -> None:
    """Number the modules that a rank steps before the others; one alone is called as if no other had been called.

    Other ranks may not call the other modules, such as a copy that rank 0 evaluates.
    """
    stepped = {param.name for event in tape.events if isinstance(event, Step) for param in event.params}
    of = {each: any(name.startswith(each) for name in stepped) for each in tape.labels}
    labels = sorted(of, key=lambda each: (not of[each], int(_NUMBER.findall(each)[-1])))
    if not any(of.values()):
        return
    alone = sum(of.values()) == 1
    renamed = {
        label: "" if alone and not at else _NUMBER.sub(f"{at}.", label) for at, label in enumerate(labels)
    }

    def called(name: str) -> str:
        label = next((each for each in labels if name.startswith(each)), "")
        return renamed.get(label, "") + name.removeprefix(label)

    for event in tape.events:
        if isinstance(event, (ProgramInput, Scaled)):
            event.name = called(event.name)
        elif isinstance(event, Sent):
            event.parameters = [called(name) for name in event.parameters]
            event.buffers = [called(name) for name in event.buffers]
            event.gradients = [called(name) for name in event.gradients]
        elif isinstance(event, Root):
            event.held = {called(name): x for name, x in event.held.items()}
        elif isinstance(event, Step):
            for param in event.params:
                param.name = called(param.name)
            for key in ("buffers", "written", "frozen", "modes", "mixed", "taken"):
                setattr(event, key, {called(name): x for name, x in getattr(event, key).items()})
    tape.labels = set(renamed.values()) - {""}


def refs(event: Event) -> list[int]:
    """The numbers of the tensors that an event takes."""
    if isinstance(event, Sent):
        return event.ins
    if isinstance(event, Alias):
        return [event.of]
    if isinstance(event, Op):
        return list(_refs((event.args, event.kwargs)))
    return []


def makes(event: Event) -> Sequence[int]:
    """The numbers of the tensors that an event makes, or writes to."""
    if isinstance(event, (ProgramInput, Alias)):
        return (event.id,)
    return event.outs if isinstance(event, (Op, Sent)) else ()


def _refs(value: Any) -> Iterator[int]:
    if isinstance(value, Ref):
        yield value.id
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _refs(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _refs(part)


class Gradients:
    """Where the gradients of parameters, each with its name, are in memory; empty until a backward has ended."""

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

    def present(self) -> Iterator[Tensor]:
        """The gradients that there are."""
        yield from (gradient for _, p in self._parameters() if (gradient := gradient_of(p)) is not None)

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
        at, last = address_of(x), end_of(x)
        for name, held in self._named:
            p = held()
            gradient = None if p is None else gradient_of(p)
            if gradient is None or not address_of(gradient) <= at <= last <= end_of(gradient):
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
    return None if gradient is None else local_part(gradient)


def _span(x: Tensor) -> tuple[int, int]:
    return address_of(x), x.numel() * x.element_size()


def end_of(x: Tensor) -> int:
    """Where the last entry of a tensor ends in memory."""
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
    """What a tensor is that is made of gradients."""

    factor: float = 1.0  # what they were multiplied by, in another tensor than their own
    share: float = 1.0  # the same, where it may be that of a mean over ranks
    own: bool = False  # whether by a number that comes from gradients
    number: bool = False  # whether it is such a number itself: a norm, a product of two gradients
    # the first operation on them that is neither a sum nor a multiple; None where there is none
    changed: Changed | None = None
    backward: int = 0  # the latest backward that is in them, counted from the first one


class Changes:
    """What a program makes of gradients between a backward and a step, but for sums over ranks and multiples."""

    def __init__(self, gradients: Gradients, site: Callable[[], int], ranks: int) -> None:
        self._gradients, self._site, self._ranks = gradients, site, ranks
        self._by_name: dict[str, Moved] = {}
        self._by_store: dict[int, tuple[Tensor, Moved]] = {}
        self.read = False
        """Whether the program has read a number that comes from gradients."""
        self._backward = 0

    def backward_begins(self) -> None:
        """It is added to what is in the parameters' gradients, and not to what was made of them."""
        self._backward += 1
        there = {_memory(gradient) for gradient in self._gradients.present()}
        self._by_name = {
            name: replace(moved, backward=self._backward) for name, moved in self._by_name.items()
        }
        for at in there & self._by_store.keys():
            x, moved = self._by_store[at]
            self._by_store[at] = x, replace(moved, backward=self._backward)

    def at_step(self, x: Tensor, left: Tensor | None) -> Moved | None:
        """What is known of a gradient that a step uses, where backward has left another tensor or the same one."""
        moved = self.of(x)
        if moved is None or moved.changed is not None:
            return moved
        if moved.backward < self._backward:
            return replace(moved, changed=Changed("it is that of an earlier backward", -1))
        name, at = self._gradients.name_at(x), _memory(x)
        followed = at in self._by_store or name in self._by_name or left is None or at == _memory(left)
        return moved if followed else replace(moved, changed=Changed("replaced", -1))

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
        return None if name is None else Moved(backward=self._backward)

    def arrives(self, tensors: Iterable[Tensor]) -> None:
        """A collective or a message has written these: gradients of other ranks, as it is after a backward."""
        for x in tensors:
            if x.is_floating_point() and self.of(x) is None:
                self._by_store[_memory(x)] = x, Moved(backward=self._backward)

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
        first = replace(first, backward=max(known.backward for _, known in full))
        if before is not None:
            return replace(first, changed=before)
        if name in _KEEPS:
            return first if alike else self._changed(name, full)
        if name in ("mul", "div") and len(full) == 1:
            numbers = [x for x in operands if x is not full[0][0]]
            number: Any = (
                numbers[0] if numbers else bound.get("other", bound.get("scalar", bound.get("scalars")))
            )
            if isinstance(number, Tensor) and (number.numel() == 1 or is_constant(number)):
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
            own = first.own or weighed or any(known.number for _, known in moved)
            if len(full) > 1 and (own or name == "sub"):
                return self._changed(name, full)
            return first
        return self._changed(name, full)

    def _changed(self, name: str, full: Sequence[tuple[Tensor, Moved]]) -> Moved:
        x, known = full[0]
        before = x.detach().clone() if len(full) == 1 else None
        return replace(known, number=False, changed=Changed(name, self._site(), before))


MOVES = frozenset({
    *("view", "_unsafe_view", "_reshape_alias", "clone", "alias", "detach", "t", "transpose", "permute", "expand"),
    *("squeeze", "unsqueeze", "slice", "select", "split", "split_with_sizes", "chunk", "unbind"),
})  # fmt: skip
"""Operators whose results have entries of their operand, as they are."""
_KEEPS = {
    *(*MOVES, "narrow", "cat", "stack", "copy", "_to_copy", "to", "as_strided", "index_select", "constant_pad_nd"),
    *("neg", "sum", "mean", "lift_fresh", "_coalesced", "coalesce", "_to_dense", "resize", "set"),
}  # fmt: skip
"""Operators that move gradients, or add them up."""
_TO_NUMBERS = {
    *("sum", "mean", "norm", "linalg_vector_norm", "linalg_norm", "dot", "vdot", "max", "amax", "mv", "mm"),
}  # fmt: skip


def is_mean(factor: float, ranks: int) -> bool:
    """Whether a factor is that of a mean over ranks, or takes one back."""
    return factor > 0 and any(
        abs(factor * n - 1) < 1e-6 or abs(factor / n - 1) < 1e-6 for n in range(2, ranks + 1)
    )


def is_constant(x: Tensor) -> bool:
    """Whether all its entries are one number."""
    return x.numel() > 0 and bool((x == x.flatten()[0]).all())


def _memory(x: Tensor) -> int:
    """Where a tensor's memory is."""
    try:
        return int(memory_of(x))
    except (RuntimeError, NotImplementedError):
        return 0


def parameters_of(
    held: Sequence[Any],
    names: dict[int, str],
    id_of: Callable[[Tensor], int | None],
    returned: dict[int, Tensor],
    change_of: Callable[[Any, Tensor | None], Moved] = lambda *_: Moved(),
) -> list[Param]:
    """Copies of parameters and gradients.

    Names are by the identity of the parameter, and so are gradients that the program asked for; `id_of` is the number
    of a leaf, and `change_of` what the program made of a parameter's gradient.
    """
    found = []
    for at, p in enumerate(held):
        grad = p.grad if p.grad is not None else returned.get(id(p))
        local = local_part(p)
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


def _copy(x: Any) -> Tensor:
    local: Tensor = local_part(x).detach()
    return local.to_dense() if local.layout is not torch.strided else local.clone()


def _placements(x: Any) -> list[tuple[str, int]]:
    found = []
    for each in getattr(x, "placements", ()):
        if each.is_shard():
            found.append(("shard", int(each.dim)))
        else:
            found.append(("replicate" if each.is_replicate() else "partial", 0))
    return found


_WRAPPERS = ("DistributedDataParallel", "OptimizedModule", "DataParallel")
"""Modules around a module, whose names would only stand before those of its parameters."""


_OF_MODES = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
)
"""Layers that compute something else in evaluation than in training."""


class Modules:
    """The modules that are called, from the outermost; a context."""

    def __init__(self) -> None:
        self._stack: list[nn.Module] = []
        self._roots: list[weakref.ref[nn.Module]] = []
        self._hooks: list[Any] = []
        self._modes: dict[int, bool] = {}
        self.labels: set[str] = set()
        """What has stood before names."""
        self.still: set[int] = set()
        """The identities of parameters that take no gradient, and of buffers, of modules that were called."""
        self.registered: Any = WeakTensors()
        """Parameters with their numbers, as modules got them."""
        self.at: dict[int, weakref.ref[Tensor]] = {}
        """The same by their addresses."""

    def __enter__(self) -> Modules:
        self._hooks = [
            register_module_forward_pre_hook(self._enters),
            register_module_forward_hook(self._leaves, always_call=True),
            register_module_parameter_registration_hook(self._registers),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _registers(self, _: nn.Module, __: str, p: nn.Parameter | None) -> None:
        if p is not None and p.requires_grad:
            self.registered.setdefault(p, len(self.registered))
            self.at[address_of(p)] = weakref.ref(p)

    def is_copied(self, p: Tensor) -> bool:
        """Whether another parameter, which a module has got, has the same value: a step of one may be a trial."""
        own = local_part(p)
        others = (local_part(x) for x in self.registered if x is not p and x.shape == p.shape)
        others = (
            x for x in others if memory_of(x) or not x.numel()
        )  # FSDP frees the memory of whole parameters
        alike = any(x.device == own.device and torch.equal(x, own) for x in others)
        return alike and own.numel() > 1 and not is_constant(own)

    def _enters(self, module: nn.Module, _: Any) -> None:
        if not self._stack and not any(root() is module for root in self._roots):
            self._roots.append(weakref.ref(module))
        if not self._stack:
            self.still.update(id(p) for p in module.parameters() if not p.requires_grad)
            self.still.update(id(x) for x in module.buffers() if x.is_floating_point())
        if torch.is_grad_enabled() and isinstance(module, _OF_MODES):
            self._modes[id(module)] = module.training or self._modes.get(id(module), False)
        self._stack.append(module)

    def _leaves(self, module: nn.Module, _: Any, __: Any) -> None:
        while self._stack and self._stack.pop() is not module:
            pass

    def roots(self) -> list[nn.Module]:
        """The outermost modules that were called and still exist, without those that are a part of another."""
        alive = [module for root in self._roots if (module := root()) is not None]
        parts = {id(part) for module in alive for part in module.modules() if part is not module}
        return [module for module in alive if id(module) not in parts]

    def names(self) -> dict[int, str]:
        """The name of each parameter, by its identity."""
        found: dict[int, str] = {}
        for label, module in self._labelled():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                found.setdefault(id(parameter), label + name)
        return found

    def parameters(self) -> list[Tensor]:
        """All parameters."""
        return [parameter for module in self.roots() for parameter in module.parameters()]

    def buffers(self) -> dict[str, Tensor]:
        """Floating-point buffers, by their names, without those that DistributedDataParallel sends at each forward."""
        ddp = nn.parallel.DistributedDataParallel
        parts = (part for module in self.roots() for part in module.modules())
        sent = {
            id(x) for p in parts if isinstance(p, ddp) and p.will_sync_module_buffers() for x in p.buffers()
        }
        return {
            label + name: buffer
            for label, module in self._labelled()
            for name, buffer in module.named_buffers()
            if buffer.is_floating_point() and type(buffer) is Tensor and id(buffer) not in sent
        }

    def frozen(self) -> dict[str, Tensor]:
        """Parameters that take no gradient, by their names."""
        return {
            label + name: parameter
            for label, module in self._labelled()
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad and type(parameter) is nn.Parameter
        }

    def modes(self) -> dict[str, bool]:
        """Whether layers were in training in any call for gradients since the last time; by their names."""
        named = (
            (label + name, module)
            for label, root in self._labelled()
            for name, module in root.named_modules()
        )
        found = {name: self._modes[id(module)] for name, module in named if id(module) in self._modes}
        self._modes = {}
        return found

    def name_of(self, leaf: Tensor) -> str:
        """The name of a parameter that an operator has just met: of what its module holds at this moment."""
        for module in reversed(self._stack):
            for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if parameter is leaf:
                    return self._path(module) + own
        return self.names().get(id(leaf), "")

    def averaging(self) -> tuple[int, ...]:
        """The ranks over which a DistributedDataParallel averages gradients; () without one."""
        for module in self.roots():
            for part in module.modules():
                if isinstance(part, nn.parallel.DistributedDataParallel):
                    return tuple(torch.distributed.get_process_group_ranks(part.process_group))
        return ()

    def _path(self, wanted: nn.Module) -> str:
        for label, module in self._labelled():
            for name, part in module.named_modules():
                if part is wanted:
                    return f"{label}{name}." if name else label
        return ""

    def _labelled(self) -> list[tuple[str, nn.Module]]:
        bare = []
        for module in self.roots():
            while type(module).__name__ in _WRAPPERS:
                module = next(iter(module.children()))
            bare.append(module)
        if len(bare) == 1:
            return [("", bare[0])]
        labelled = [(f"{type(module).__name__}{at}.", module) for at, module in enumerate(bare)]
        self.labels.update(label for label, _ in labelled)
        return labelled
