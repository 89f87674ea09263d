"""The tape: what one rank's program did, in order, as plain values that another process can read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradmesh.checker.findings import Place

__all__ = [
    "Alias",
    "Back",
    "Called",
    "Changed",
    "Event",
    "Hooked",
    "Lost",
    "Op",
    "Over",
    "Param",
    "Plateau",
    "ProgramInput",
    "Ref",
    "Root",
    "Saved",
    "Scaled",
    "Sent",
    "Settings",
    "Step",
    "Tape",
    "Term",
    "Verb",
    "refs",
]


@dataclass(slots=True)
class Ref:
    """A tensor of the tape, by its number, where an operator takes one."""

    id: int


@dataclass(slots=True)
class ProgramInput:
    """A tensor that no recorded operator made: a parameter, data, what was computed without gradients.

    Attributes:
        id: its number.
        value: a copy.
        leaf: whether autograd accumulates a gradient for it.
        name: of the parameter, as its module calls it; "" for what has none.
        random: whether a random operator made it.
        lost: why it is not known where it came from, though autograd follows it; "" where that is known.
        site: of the line that took it, where it is lost.
    """

    id: int
    value: Tensor
    leaf: bool = False
    name: str = ""
    random: bool = False
    lost: str = ""
    site: int = -1


@dataclass(slots=True)
class Alias:
    """Another view of a tensor's memory that no recorded operator made."""

    id: int
    of: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class Op:
    """An operator that gradients pass through; inside of a hand-written Function's forward too.

    Attributes:
        name: as "aten.mul.Tensor".
        args, kwargs: with a `Ref` for each tensor.
        outs: the numbers of the results' tensors, in order; that of an operand where it was written in place.
        site: of the line, in the tape's `places`.
        call: which call of a Function it is in.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[int]
    site: int
    call: int | None


@dataclass(slots=True)
class Verb:
    """The op of one of the library's own calls, as `gradmesh.ops.traced` has it.

    Attributes:
        words, numbers, tensors: what it is made of.
        rank, size: of the axis.
    """

    words: str
    numbers: list[int]
    tensors: list[Tensor]
    rank: int
    size: int


@dataclass(slots=True)
class Sent:
    """A collective, or a message.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter",
            "send", "recv", "barrier".
        group: its global ranks; name: what the ranks call it.
        ins, outs: numbers of what is handed in and of what is written, or made.
        reduce: how ranks are combined, in lower case; "" where they are not.
        root: the rank of the group, or the peer of a message.
        tag: of a message.
        splits: rows to and from each rank of a flat all-to-all.
        shapes: of what is handed in, for those whose gradients are not followed too.
        rounded: whether that has 16 bits or fewer.
        followed: whether the numbers are there, so that it can be run again.
        hidden: whether autograd follows an operand and knows nothing of the call.
        phase: "forward", "backward", or "apart" (no gradients are followed).
        total: what a sum of one number came to.
        verb: where it is one of the library's own calls, by all ranks of `group`, or by this one alone where nothing is
            sent.
        parameters: the names of parameters that a broadcast or a sum before the first backward takes, or writes.
    """

    kind: str
    group: tuple[int, ...]
    name: str
    ins: list[int]
    outs: list[int]
    site: int
    call: int | None
    reduce: str = ""
    root: int = -1
    tag: int = 0
    splits: tuple[list[int], list[int]] | None = None
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    rounded: bool = False
    followed: bool = False
    hidden: bool = False
    phase: str = "forward"
    total: float | None = None
    verb: Verb | None = None
    parameters: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Back:
    """What a backward, or a hook, that sends nothing made of the gradients that it met.

    Attributes:
        ops: its operators on these and on what was made of them, and the data that they took.
        met, gave: copies of the gradients that it was given and that it returned.
        ins, outs: their numbers, which are of this tape alone.
        repeats: whether it can be run again: nothing of it was drawn at random in place.
    """

    ops: list[Op | ProgramInput]
    met: list[Tensor | None]
    gave: list[Tensor | None]
    outs: list[int | None]
    ins: list[int | None] = field(default_factory=list)
    repeats: bool = True


@dataclass(slots=True)
class Called:
    """A call of a hand-written Function that is over, and what its backward did when that ran.

    Attributes:
        number: which call.
        name: of the class.
        site: where it was called.
        ins, outs: numbers of its tensors; None for one that the tape does not know.
        begin: how many events there were before it.
        sends: whether a collective is in its forward.
        sends_back: whether one is in its backward.
        received: the gradients of its results that backward met, and
        returned: those of its operands that it gave; None until it ran.
        ours: whether it is of torch itself or of gradmesh.
        back: what its backward did, where it sent nothing.
        overwrote: the line at which its backward changed a gradient that it received in place; -1 for none.
    """

    number: int
    name: str
    site: int
    ins: list[int | None]
    outs: list[int | None]
    begin: int
    sends: bool = False
    sends_back: bool = False
    received: list[Tensor | None] | None = None
    returned: list[Tensor | None] | None = None
    ours: bool = False
    back: Back | None = None
    overwrote: int = -1


@dataclass(slots=True)
class Over:
    """A call of a hand-written Function is over: from here on its results stand for it.

    Attributes:
        call: which.
        unseen: whether a result is of work that was not seen.
    """

    call: Called
    unseen: bool = False


@dataclass(slots=True)
class Hooked:
    """A hook of a tensor changed its gradient, or sent something.

    Attributes:
        id: the tensor's number.
        back: what the hook did; None: it called a collective.
        site: of the line that registered it.
    """

    id: int
    back: Back | None
    site: int


@dataclass(slots=True)
class Root:
    """A tensor that a backward began at.

    Attributes:
        id: its number.
        value: a copy, to hold what is run again against.
        weight: the gradient that it was given.
        passed_on: whether that came from another rank, which has the loss.
    """

    id: int
    value: Tensor
    weight: Tensor | None
    passed_on: bool
    site: int


@dataclass(slots=True)
class Term:
    """A loss that `gradmesh.objective` made: its ranks' losses are terms of one, and have its value all of them.

    Attributes:
        id: its number.
        group: the ranks.
    """

    id: int
    group: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Changed:
    """What a program did to a gradient before the step, other than to multiply it or to add gradients up.

    Attributes:
        what: the operator; "replaced" where it is not known what the gradient is made of, "taken away" where there is
            none any more.
        site: of the line.
        before: what it was done to, where that is one tensor.
    """

    what: str
    site: int
    before: Tensor | None = None


@dataclass(slots=True)
class Settings:
    """The numbers that an optimizer steps a group of parameters with.

    Attributes:
        numbers: by the setting's name, such as "lr" and "betas".
        made: the line that made the optimizer.
        scheduled: the line of the last step of a scheduler of it; -1 where there was none.
    """

    numbers: dict[str, tuple[float, ...]]
    made: int
    scheduled: int = -1


@dataclass(slots=True)
class Plateau:
    """A `ReduceLROnPlateau`.

    Attributes:
        optimizer: the number of its optimizer.
        made: the line that made it.
        given: the values that it was given, each with the line.
    """

    optimizer: int
    made: int
    given: list[tuple[float, int]] = field(default_factory=list)


@dataclass(slots=True)
class Param:
    """A parameter at an optimizer step.

    Attributes:
        name: as its module calls it.
        id: of the leaf of this rank's tape; None where it was not used.
        value, grad: copies, before the step; of this rank's part.
        after: the value after the step.
        mesh: the global ranks of a DTensor's mesh, nested as that is; None for a plain tensor.
        placements: of a DTensor: ("shard", dim), ("replicate", 0) or ("partial", 0) for each mesh dim.
        grad_placements: those of its gradient.
        whole: the DTensor's whole shape.
        factor: what the gradient was multiplied by in another tensor than its own, and
        share: the same, where it may be that of a mean over ranks.
        changed: what else was done to it.
        settings: of the optimizer; None where the program steps by itself.
    """

    name: str
    id: int | None
    value: Tensor
    grad: Tensor | None
    after: Tensor | None = None
    mesh: Any = None
    placements: list[tuple[str, int]] = field(default_factory=list)
    grad_placements: list[tuple[str, int]] = field(default_factory=list)
    whole: tuple[int, ...] = ()
    factor: float = 1.0
    share: float = 1.0
    changed: Changed | None = None
    settings: Settings | None = None


@dataclass(slots=True)
class Step:
    """What an optimizer's step, or the program's own writing to its parameters, begins with."""

    params: list[Param]
    buffers: dict[str, Tensor]
    site: int
    manual: bool = False
    wrapped: tuple[int, ...] = ()
    """The ranks of a DistributedDataParallel whose gradients are averaged; () without one."""
    by_gradients: bool = True
    """Whether parameters move along what is in their `.grad`, as far as the first of them tells."""
    optimizer: int = -1
    """The number of the optimizer; -1 for a step of the program's own."""
    written: dict[str, int] = field(default_factory=dict)
    """The lines at which the program last wrote to buffers and frozen parameters."""
    frozen: dict[str, Tensor] = field(default_factory=dict)
    """Copies of the parameters that take no gradient."""


@dataclass(slots=True)
class Scaled:
    """A parameter's gradient was multiplied by a number between backward and step.

    Attributes:
        name: of the parameter.
        factor: the number.
        own: whether it was made of gradients, such as of their norm, as far as is known.
        loss: whether it takes the scale of the loss back.
        by: "clip_grad_norm_" where that is torch's own, which did it.
    """

    name: str
    factor: float
    site: int
    own: bool = False
    loss: bool = False
    by: str = ""


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


Event = ProgramInput | Alias | Op | Sent | Root | Term | Step | Scaled | Saved | Lost | Over | Hooked


@dataclass
class Tape:
    """All of it.

    Attributes:
        rank, size: of the rank.
        events: in order.
        calls: of Functions, by number.
        comm_hook: the line that registered a communication hook with DistributedDataParallel; -1 where there is none.
        plateaus: the schedulers that lower a learning rate where a value stops to fall.
        places: the lines that `site` numbers.
        steps: how many optimizer steps were seen.
        ended: "stopped" after the steps asked for, "returned", or "raised".
        error: the traceback, where it raised, and
        raised_at: the line of the program.
        seconds: how long the program ran.
    """

    rank: int
    size: int
    events: list[Event] = field(default_factory=list)
    calls: dict[int, Called] = field(default_factory=dict)
    comm_hook: int = -1
    plateaus: list[Plateau] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    steps: int = 0
    ended: str = "returned"
    error: str = ""
    raised_at: int = -1
    seconds: float = 0.0


def refs(event: Event) -> list[int]:
    """The numbers of the tensors that an event takes."""
    if isinstance(event, Sent):
        return event.ins
    if isinstance(event, Alias):
        return [event.of]
    if isinstance(event, Op):
        return list(_refs((event.args, event.kwargs)))
    return []


def _refs(value: Any) -> Iterator[int]:
    if isinstance(value, Ref):
        yield value.id
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _refs(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _refs(part)
