"""What a rank says about a call, so that ranks whose calls do not fit together hear of it.

Each call that sends has a number among the calls of its group, the same on all ranks, since all make the same calls.
A backward call says of which call it is the backward: two backward calls of one kind and one shape, for outputs that
two ranks used differently, would else be taken for each other. What is called without anything being sent, and whose
backward sends, is numbered too, and told with the next call that sends.

A backward that a user wrote calls verbs by hand: what it tells of itself is in `manual_calls`.

Beside what is compared, a rank tells whether its call will have a backward: see `NEEDS_BACKWARD`.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from gradmesh._torch import function_backward, function_forward
from gradmesh.backends.call_check import CallCheck
from gradmesh.call_sites import Site, call_site, show_site
from gradmesh.errors import MismatchError, message
from gradmesh.transport import manual_calls

__all__ = [
    "BACKWARD",
    "CAN_BACKWARD",
    "DEFERRED",
    "NEEDS_BACKWARD",
    "TANGENT",
    "ZERO_GRAD",
    "CallRecord",
    "Calls",
    "OpCallCheck",
    "Signature",
    "call_check",
    "calls_of",
    "refusal_text",
]

NEEDS_BACKWARD = 1
"""A flag: this rank will take part in the call's backward."""
CAN_BACKWARD = 2
"""A flag: it would, if others do."""
ZERO_GRAD = 4
"""A flag: this rank has nothing to hand in, so that zeros stand for it."""
DEFERRED = 4
"""A flag of a call that is no backward: this rank would put its backward's sum off, as `no_sync` says."""

BACKWARD = "the backward of"
TANGENT = "the tangent of"
_ROLE_NUMBER = {"": 0, BACKWARD: 1, TANGENT: 2}

_ORDERED = (
    "run forward and backward inside gradmesh.ordered(): there every rank takes part in the backward of every call, "
    "in one order, whatever its loss uses"
)
_OUTSIDE = (
    "have every rank use every result of that function, loss + 0 * y.sum(), or call the verb outside of it, where "
    "gradmesh.ordered() sees to its backward; for a region of checkpoint() say use_reentrant=False"
)
_SHOWN_LOCAL = 4


@dataclass(frozen=True, slots=True)
class Signature:
    """What a call says that is the same each time: the words, and a number that differs where they do."""

    verb: str
    axis: str
    text: str
    digest: int

    @classmethod
    def of(cls, verb: str, axis: str, text: str, own: str = "") -> Signature:
        """Made of the words.

        Args:
            verb: the verb that is called, for the error.
            axis: the axis, for the error.
            text: what every rank has to say alike.
            own: what each may say differently, for the error alone.
        """
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return cls(verb, axis, text + own, int.from_bytes(digest, "little", signed=True))


class DefersReduction(Protocol):
    """Who may keep what a backward call would send."""

    def defers(self, node: Any, grad: Tensor | None) -> bool:
        """Whether it does, of this gradient of a node's result."""


@dataclass(slots=True, eq=False)
class CallRecord:
    """What autograd remembers of one call on this rank.

    Attributes:
        role: what it is to the call that it comes from: `BACKWARD` or `TANGENT`; "" for a call of its own.
        origin: that call.
        flags: `NEEDS_BACKWARD`, `CAN_BACKWARD`, and `ZERO_GRAD` or `DEFERRED`.
        ordered: whether it is a link of the chain of `ordered()`.
        number: its place among the calls of the group that are compared; 0: nothing is compared.
        local: its place among the calls since then that send nothing; 0: it sends.
        text: the call in words.
        site: where it was made.
        heard: the flags of every rank, if they differ.
        traced: in a program that is being traced, its place, a value that comes when the program runs.
        deferral: keeps the gradient instead of sending it in backward, where the reduction is deferred.
    """

    role: str = ""
    origin: CallRecord | None = None
    flags: int = 0
    ordered: bool = False
    number: int = 0
    local: int = 0
    text: str = ""
    site: Site = None
    peer_flags: Sequence[int] | None = None
    traced: Tensor | None = None
    deferral: DefersReduction | None = None

    @property
    def deferred(self) -> bool:
        """Whether every rank would put the sum of its backward off, as far as that was compared."""
        flags = [self.flags] if self.peer_flags is None else self.peer_flags
        return all(f & DEFERRED for f in flags)

    @property
    def others_need_backward(self) -> bool:
        """Whether another rank will take part in the call's backward, and this one would not."""
        return (
            self.peer_flags is not None
            and not self.flags & NEEDS_BACKWARD
            and any(f & NEEDS_BACKWARD for f in self.peer_flags)
        )

    @property
    def all_zero(self) -> bool:
        """Whether no rank had anything to hand in, as far as that was compared."""
        flags = [self.flags] if self.peer_flags is None else self.peer_flags
        return self.number > 0 and all(f & ZERO_GRAD for f in flags)

    def sibling(self) -> CallRecord:
        """One for a further call that is the same to the call that it comes from."""
        return CallRecord(self.role, self.origin)

    @property
    def place(self) -> str:
        """Its place among the calls of the group, in words."""
        return f"{self.number}.{self.local}" if self.local else str(self.number)

    def describe(self) -> str:
        """The call in words, and where it was made."""
        return f"{self.text} {show_site(self.site)}{self.of()}"

    def of(self) -> str:
        """What it comes from, in words."""
        if self.origin is None:
            return ""
        return f", {self.role} call {self.origin.place}: {self.origin.describe()}"


class Calls:
    """The calls of a group, as one of its ranks counts them."""

    __slots__ = ("functions", "local", "local_digest", "lock", "number", "words")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held during a call that is compared: threads that call on one group must not mix their motions."""
        self.number = 0
        """How many calls were compared."""
        self.local = 0
        """How many since the last of these sent nothing, and have a backward that does."""
        self.local_digest = 0
        """A number made of those."""
        self.words: list[str] = []
        self.functions = manual_calls.Functions()
        """Those that call by hand."""

    def note(self, said: Signature, recorded: CallRecord) -> None:
        """Count a call that sends nothing."""
        self.local += 1
        self.local_digest = hash((self.local_digest, said.digest))
        recorded.number, recorded.local = self.number, self.local
        if self.local <= _SHOWN_LOCAL:
            self.words.append(f"{said.text} {show_site(call_site())}")


_counted: WeakKeyDictionary[dist.ProcessGroup, Calls] = WeakKeyDictionary()


def calls_of(group: dist.ProcessGroup) -> Calls:
    """The calls of a group, as the calling rank counts them."""
    found = _counted.get(group)
    if found is None:
        found = _counted[group] = Calls()
    return found


class OpCallCheck(CallCheck):
    """The claim of one call of an op.

    Args:
        said: what it says each time.
        recorded: what is remembered of it; None where nobody will ask.
    """

    __slots__ = ("_backward_node", "_forward_node", "_function_calls", "_preceding", "_record", "_signature")

    sends_positions: bool = True
    """Whether there is room to tell the places of calls by hand."""

    def __init__(self, said: Signature, recorded: CallRecord | None) -> None:
        self.digest = said.digest
        self.flags = 0 if recorded is None else recorded.flags
        self.peer_flags = None
        self._signature, self._record = said, recorded
        self._preceding: list[str] = []
        self._function_calls: manual_calls.FunctionCalls | None = None
        # Asked now: what moves the bytes switches autograd off. A call of gradmesh's own nodes is recorded.
        self._backward_node = function_backward() if recorded is None or recorded.origin is None else None
        self._forward_node = function_forward() if recorded is None else None

    @property
    def verb(self) -> str:
        """The verb that is called."""
        return self._signature.verb

    @property
    def recorded(self) -> CallRecord | None:
        """What autograd remembers of the call, and what it comes from."""
        return self._record

    def count(self, calls: Calls) -> None:
        """Take a number, as the call is about to be made, and say of which call it is the backward."""
        calls.number += 1
        if self._backward_node is not None and self.sends_positions:
            self._function_calls = calls.functions.of(self._backward_node)
            self.flags |= (
                0 if self._function_calls is None else manual_calls.encode_flags(self._function_calls)
            )
        if self._forward_node is not None:
            calls.functions.note(self._forward_node, calls.number, self._signature.text)
        of: tuple[int, ...] = ()
        if (recorded := self._record) is not None:
            recorded.number = calls.number
            if (origin := recorded.origin) is not None:
                of = _ROLE_NUMBER[recorded.role], origin.number, origin.local
        if of or calls.local:
            # No number here is negative: -1 and -2 have one hash.
            self.digest = hash((self.digest, of, calls.local, calls.local_digest))
        if calls.local:
            self._preceding, calls.words = calls.words, []
            if calls.local > _SHOWN_LOCAL:
                self._preceding.append(f"{calls.local - _SHOWN_LOCAL} more such calls")
            calls.local = calls.local_digest = 0

    def settle(self) -> None:
        """Look at what the others said of their part in the backward.

        Raises:
            MismatchError: some rank will take part in the backward of this call, and another one cannot; or the call is
                made by hand in the backward of two different calls.
        """
        peer_flags = self.peer_flags
        if peer_flags is None:
            return
        if self._record is not None:
            self._record.peer_flags = peer_flags
        if self.sends_positions and manual_calls.conflicting(peer_flags):
            self._refuse(
                "the ranks are in the backward of different calls of a function",
                expected="the backward of the same call on every rank, in the same order",
                got=manual_calls.show_flags(peer_flags, self._function_calls),
                remedy=_OUTSIDE,
            )
        if any(flags & NEEDS_BACKWARD for flags in peer_flags) and not all(
            flags & (NEEDS_BACKWARD | CAN_BACKWARD) for flags in peer_flags
        ):
            self._refuse(
                "a rank will take part in the backward of this call, and another one cannot",
                expected="gradients recorded on every rank, or on none",
                got="\n".join(
                    f"rank {rank}: {_BACKWARD_STATUS[flags & (NEEDS_BACKWARD | CAN_BACKWARD)]}"
                    for rank, flags in enumerate(peer_flags)
                ),
                remedy="enter torch.no_grad() on every rank or on none, or detach() the operand on all; inside a "
                "torch.func transform, make it depend on what is differentiated on every rank; compile "
                "the function on every rank or on none",
            )

    def _refuse(self, problem: str, *, expected: str, got: str, remedy: str) -> NoReturn:
        """Raise the error of what the ranks told, which is the same on all of them but for the call in words."""
        raise MismatchError(
            message(
                problem,
                op=self._signature.verb,
                axis=self._signature.axis,
                expected=expected,
                got=f"{got}\nin {self.said()}",
                remedy=remedy,
            )
        )

    def said(self) -> str:
        """The call, where it is, what it is the backward of, and what went before it without being sent."""
        said = f"{self._signature.text} {show_site(call_site())}"
        if self._record is not None:
            said += self._record.of()
        if self._function_calls is not None:
            said += f", {self._function_calls}"
        return f"{said}, after {' and '.join(self._preceding)}" if self._preceding else said

    def refusal(self, words: list[str]) -> Exception:
        """One table: what each rank called, where, and the remedy."""
        if any(f", {BACKWARD} call " in said for said in words):
            expected = "the backward of the same call on every rank, in the same order"
            remedy = _ORDERED
        elif len({_preceding(said) for said in words}) > 1:
            expected = "the same calls on every rank, those before it that send nothing themselves among them"
            remedy = (
                "look where the ranks part: replicate and shard of what requires grad belong on every rank"
            )
        else:
            expected, remedy = _SAME_OPERANDS, _remedy(words)
        return MismatchError(
            message(
                "the ranks' calls do not fit together",
                op=self._signature.verb,
                axis=self._signature.axis,
                expected=expected,
                got="\n".join(f"rank {rank}: {said}" for rank, said in enumerate(words)),
                remedy=remedy,
            )
        )


_SAME_OPERANDS = "the same call, with operands of the same dtype and sizes, on every rank"
_CALL = re.compile(r"(\w+)\((.*?)\) of (\w+)\[([\d, ]*)\]")
_PLACES = re.compile(r" at \S+:\d+ in \S+")


def _preceding(said: str) -> str:
    """The calls before one that send nothing, without their places, which may differ."""
    return _PLACES.sub("", said.partition(", after ")[2])


def _remedy(words: Sequence[str]) -> str:
    """What to do about calls that differ in themselves."""
    calls = [found.groups() for found in map(_CALL.match, words) if found is not None]
    if len(calls) < len(words):  # a call without an operand, or an error of the call on some rank
        return "look at the lines above, and make the same call on every rank"
    verbs, arguments, dtypes, _ = (set(column) for column in zip(*calls, strict=True))
    if len(verbs) > 1:
        return "make the same call on every rank: look for the condition under which the ranks take different lines"
    if len(arguments) > 1:
        return "pass the same arguments on every rank"
    if len(dtypes) > 1:
        return "convert the operand to one dtype on every rank"
    sizes = [[int(size) for size in call[3].split(",") if size.strip()] for call in calls]
    differ = [dim for dim, each in enumerate(zip(*sizes, strict=False)) if len(set(each)) > 1]
    along = re.search(r"\bdim=(\d+)", calls[0][1])
    if "sizes=equal" in calls[0][1] and along is not None and differ == [int(along[1])]:
        each = tuple(one[differ[0]] for one in sizes)
        if verbs <= {"reduce_scatter", "shard"}:
            return f"hand in a tensor of the same size along dim {differ[0]} on every rank"
        return f'if the sizes differ on purpose, pass sizes="auto" or sizes={each}; else make them equal'
    return "hand in tensors of the same shape on every rank"


_BACKWARD_STATUS = {
    0: "under torch.no_grad(), in a transform with an operand that requires no gradient, or in a compiled program",
    NEEDS_BACKWARD: "its operand requires grad",
    CAN_BACKWARD: "its operand requires no gradient",
    NEEDS_BACKWARD | CAN_BACKWARD: "its operand requires grad",
}


def call_check(verb: str, axis: str, text: str) -> OpCallCheck:
    """Make the claim of a call that is no op's.

    Args:
        verb: the verb that is called, for the error.
        axis: the axis, for the error.
        text: what every rank has to say alike.
    """
    return OpCallCheck(Signature.of(verb, axis, text), None)


def refusal_text(error: Exception) -> str:
    """What a rank says that refuses its call: the error, and where."""
    return f"{type(error).__name__} {show_site(call_site())}: {error}"
