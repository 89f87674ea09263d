"""Call checks: what the ranks compare about a call, so that mismatched calls raise on every rank.

Each call that sends has a sequence number in its group, the same on all ranks. A backward call includes the number of
its forward call: otherwise two backward calls of the same kind and shape could be mispaired where ranks use outputs
differently. Calls that send nothing but whose backward sends are numbered too, and checked with the next call that
sends.

Calls in a user-written autograd.Function are handled in `manual_calls`.

In addition, each rank reports whether its call will have a backward: see `NEEDS_BACKWARD`.
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
"""A flag: this rank will run the call's backward."""
CAN_BACKWARD = 2
"""A flag: this rank can run the call's backward if another rank needs it."""
ZERO_GRAD = 4
"""A flag: this rank has no gradient, and passes zeros."""
DEFERRED = 4
"""A flag of a forward call: this rank defers its backward reduction (`no_sync`)."""

BACKWARD = "the backward of"
TANGENT = "the tangent of"
_ROLE_NUMBER = {"": 0, BACKWARD: 1, TANGENT: 2}

_ORDERED = (
    "run forward and backward inside `with gradmesh.ordered():`, and end the block with gradmesh.backward(loss) on "
    "every rank: it runs the backward of every call in the same order, also where the loss does not use the result"
)
_OUTSIDE = (
    "use every result of that autograd.Function on every rank (loss + 0 * y.sum()), or call the collective outside of "
    "it, inside `with gradmesh.ordered():`; for torch.utils.checkpoint pass use_reentrant=False"
)
_SHOWN_LOCAL = 4


@dataclass(frozen=True, slots=True)
class Signature:
    """Cached call signature: its text and a 64-bit digest of it."""

    verb: str
    axis: str
    text: str
    digest: int

    @classmethod
    def of(cls, verb: str, axis: str, text: str, own: str = "") -> Signature:
        """Make one from its text.

        Args:
            verb: the verb that is called, for the error.
            axis: the axis, for the error.
            text: the part that has to be the same on every rank.
            own: the part that may differ between ranks, only for the error.
        """
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return cls(verb, axis, text + own, int.from_bytes(digest, "little", signed=True))


class DefersReduction(Protocol):
    """Defers the reduction of a backward call."""

    def defers(self, node: Any, grad: Tensor | None) -> bool:
        """Defer this gradient of a node's result; False: it has to be reduced now."""


@dataclass(slots=True, eq=False)
class CallRecord:
    """Metadata of one call on this rank.

    Attributes:
        role: `BACKWARD` or `TANGENT` of `origin`; "" for a forward call.
        origin: the forward call that this call belongs to.
        flags: `NEEDS_BACKWARD`, `CAN_BACKWARD`, and `ZERO_GRAD` or `DEFERRED`.
        ordered: whether it is an ordered op, inside `ordered()`.
        number: its sequence number among the compared calls of the group; 0: not compared.
        local: its number among the calls since then that send nothing; 0: it sends.
        text: description of the call.
        site: its call site.
        peer_flags: the flags of every rank, if they differ.
        traced: in a traced program, its sequence number as a tensor that exists when the program runs.
        deferral: defers the gradient reduction instead of sending in backward.
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
        """Whether every rank defers the reduction of its backward, as far as that was compared."""
        flags = [self.flags] if self.peer_flags is None else self.peer_flags
        return all(f & DEFERRED for f in flags)

    @property
    def others_need_backward(self) -> bool:
        """Whether another rank will run the call's backward, and this one would not."""
        return (
            self.peer_flags is not None
            and not self.flags & NEEDS_BACKWARD
            and any(f & NEEDS_BACKWARD for f in self.peer_flags)
        )

    @property
    def all_zero(self) -> bool:
        """Whether no rank had a gradient, as far as that was compared."""
        flags = [self.flags] if self.peer_flags is None else self.peer_flags
        return self.number > 0 and all(f & ZERO_GRAD for f in flags)

    def sibling(self) -> CallRecord:
        """A record for another call with the same role and origin."""
        return CallRecord(self.role, self.origin)

    @property
    def place(self) -> str:
        """Its sequence number in the group, as text."""
        return f"{self.number}.{self.local}" if self.local else str(self.number)

    def describe(self) -> str:
        """The call and its call site, as text."""
        return f"{self.text} {show_site(self.site)}{self.of()}"

    def show_origin(self) -> str:
        """What it is the backward or tangent of, such as "the backward of all_gather at train.py:12 in step"."""
        if self.origin is None:
            return f"{self.text.partition('(')[0] or 'a call'} {show_site(self.site)}"
        return f"{self.role} {self.origin.show_origin()}"

    def of(self) -> str:
        """The forward call that it belongs to, as text."""
        if self.origin is None:
            return ""
        return f", {self.role} call {self.origin.place}: {self.origin.describe()}"


class Calls:
    """One rank's counter of the calls on a group."""

    __slots__ = ("functions", "local", "local_digest", "lock", "number", "words")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held during a call that is compared: threads must not interleave their calls on one group."""
        self.number = 0
        """How many calls were compared."""
        self.local = 0
        """How many calls since then sent nothing but have a backward that sends."""
        self.local_digest = 0
        """A digest of those."""
        self.words: list[str] = []
        self.functions = manual_calls.Functions()
        """User-written autograd Functions that call verbs."""

    def note(self, signature: Signature, recorded: CallRecord) -> None:
        """Count a call that sends nothing."""
        self.local += 1
        self.local_digest = hash((self.local_digest, signature.digest))
        recorded.number, recorded.local = self.number, self.local
        if self.local <= _SHOWN_LOCAL:
            self.words.append(f"{signature.text} {show_site(call_site())}")


_counted: WeakKeyDictionary[dist.ProcessGroup, Calls] = WeakKeyDictionary()


def calls_of(group: dist.ProcessGroup) -> Calls:
    """The calling rank's counter of the calls on a group."""
    found = _counted.get(group)
    if found is None:
        found = _counted[group] = Calls()
    return found


class OpCallCheck(CallCheck):
    """The check of one call of an op.

    Args:
        signature: the signature of the call.
        recorded: its metadata; None where no backward can be recorded.
    """

    __slots__ = ("_backward_node", "_forward_node", "_function_calls", "_preceding", "_record", "_signature")

    sends_positions: bool = True
    """Whether the flags have room for the sequence numbers of manual calls."""

    def __init__(self, signature: Signature, recorded: CallRecord | None) -> None:
        self.digest = signature.digest
        self.flags = 0 if recorded is None else recorded.flags
        self.peer_flags = None
        self._signature, self._record = signature, recorded
        self._preceding: list[str] = []
        self._function_calls: manual_calls.FunctionCalls | None = None
        # Looked up now, because transports switch autograd off. A call of gradmesh's own nodes has a record.
        self._backward_node = function_backward() if recorded is None or recorded.origin is None else None
        self._forward_node = function_forward() if recorded is None else None

    @property
    def verb(self) -> str:
        """The verb that is called."""
        return self._signature.verb

    @property
    def recorded(self) -> CallRecord | None:
        """The metadata of the call."""
        return self._record

    def count(self, calls: Calls) -> None:
        """Assign the sequence number, and add that of the forward call to the digest."""
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
            # No number here is negative: hash(-1) == hash(-2).
            self.digest = hash((self.digest, of, calls.local, calls.local_digest))
        if calls.local:
            self._preceding, calls.words = calls.words, []
            if calls.local > _SHOWN_LOCAL:
                self._preceding.append(f"{calls.local - _SHOWN_LOCAL} more such calls")
            calls.local = calls.local_digest = 0

    def settle(self) -> None:
        """Check the flags of the other ranks.

        Raises:
            MismatchError: some rank will run the backward of this call, and another one cannot; or autograd.Functions
                make the call in the backward of different forward calls.
        """
        peer_flags = self.peer_flags
        if peer_flags is None:
            return
        if self._record is not None:
            self._record.peer_flags = peer_flags
        if self.sends_positions and manual_calls.conflicting(peer_flags):
            self._refuse(
                "the ranks run the backward of different calls of an autograd.Function",
                expected="the backward of the same call on every rank, in the same order",
                got=manual_calls.show_flags(peer_flags, self._function_calls),
                remedy=_OUTSIDE,
            )
        if any(flags & NEEDS_BACKWARD for flags in peer_flags) and not all(
            flags & (NEEDS_BACKWARD | CAN_BACKWARD) for flags in peer_flags
        ):
            self._refuse(
                "some ranks will run the backward of this call, and other ranks cannot",
                expected="gradients recorded on every rank, or on no rank",
                got="\n".join(
                    f"rank {rank}: {_BACKWARD_STATUS[flags & (NEEDS_BACKWARD | CAN_BACKWARD)]}"
                    for rank, flags in enumerate(peer_flags)
                ),
                remedy="use torch.no_grad() on every rank or on none, or x.detach() on every rank; inside a torch.func "
                "transform, make the operand depend on the differentiated input on every rank; use torch.compile on "
                "every rank or on none",
            )

    def _refuse(self, problem: str, *, expected: str, got: str, remedy: str) -> NoReturn:
        """Raise the error for the ranks' flags; it is the same on every rank but for this rank's call."""
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
        """The call, its call site, its forward call, and the calls before it that sent nothing."""
        text = f"{self._signature.text} {show_site(call_site())}"
        if self._record is not None:
            text += self._record.of()
        if self._function_calls is not None:
            text += f", {self._function_calls}"
        return f"{text}, after {' and '.join(self._preceding)}" if self._preceding else text

    def refusal(self, words: list[str]) -> Exception:
        """One table: what each rank called, where, and the remedy."""
        if any(f", {BACKWARD} call " in said for said in words):
            expected = "the backward of the same call on every rank, in the same order"
            remedy = _ORDERED
        elif 0 < sum(_DEFERRED_CALL in said for said in words) < len(words):
            expected = "the same number of micro-batches on every rank"
            remedy = (
                "run the same number of micro-batches on every rank, with a zero loss (in gm.objective, weights=0) "
                "where a rank has no data; leave the no_sync() block for the same micro-batch on every rank"
            )
        elif len({_preceding(said) for said in words}) > 1:
            expected = (
                "the same calls on every rank, including preceding replicate, shard and convert (which do not "
                "communicate)"
            )
            remedy = (
                "call replicate, shard and convert on tensors that require grad on every rank, or on no rank"
            )
        else:
            expected, remedy = _SAME_OPERANDS, _remedy(words)
        return MismatchError(
            message(
                "the ranks' calls do not match",
                op=self._signature.verb,
                axis=self._signature.axis,
                expected=expected,
                got="\n".join(f"rank {rank}: {said}" for rank, said in enumerate(words)),
                remedy=remedy,
            )
        )


_SAME_OPERANDS = "the same call, with operands of the same dtype and sizes, on every rank"
_DEFERRED_CALL = "made of reductions deferred by no_sync()"
_CALL = re.compile(r"(\w+)\((.*?)\) of (\w+)\[([\d, ]*)\]")
_QUERIES = re.compile(
    r"made of nn\.ulysses_attention\(.*, sizes=equal.*\), query_sizes=\((\d+)(?:, \1)*\) with "
)
_PLACES = re.compile(r" at \S+:\d+ in \S+")


def _preceding(said: str) -> str:
    """The preceding calls that send nothing, without their call sites, which may differ."""
    return _PLACES.sub("", said.partition(", after ")[2])


def _remedy(words: Sequence[str]) -> str:
    """The remedy for calls that differ."""
    if len(queries := [found[1] for found in map(_QUERIES.search, words) if found]) == len(words):
        each = tuple(map(int, queries))
        return f'if the sizes differ on purpose, pass sizes="auto" or sizes={each}; otherwise make them equal'
    calls = [found.groups() for found in map(_CALL.match, words) if found is not None]
    if len(calls) < len(words):  # a call without an operand, or an error on some rank
        return "fix the error reported above, or make the same call on every rank"
    verbs, arguments, dtypes, _ = (set(column) for column in zip(*calls, strict=True))
    if len(verbs) > 1:
        return (
            "make the same call on every rank: compare the call sites above for a branch (often `if rank == 0`) that "
            "makes them differ"
        )
    if len(arguments) > 1:
        return "pass the same arguments on every rank"
    if len(dtypes) > 1:
        return "convert the operand to one dtype on every rank"
    if len({call[3] for call in calls}) == 1 and (origin := re.search(r", made of ([\w.]+)\(", words[0])):
        return f"pass the same arguments to {origin[1]} on every rank"
    sizes = [[int(size) for size in call[3].split(",") if size.strip()] for call in calls]
    differ = [dim for dim, each in enumerate(zip(*sizes, strict=False)) if len(set(each)) > 1]
    text = words[0].partition(" at ")[0]  # of a layer, `sizes` is in the part after "made of"
    along = re.search(r"\bdim=(\d+)", text)
    if "sizes=equal" in text and along is not None and differ == [int(along[1])]:
        each = tuple(one[differ[0]] for one in sizes)
        if verbs <= {"reduce_scatter", "shard"}:
            return f"pass a tensor of the same size along dim {differ[0]} on every rank"
        return f'if the sizes differ on purpose, pass sizes="auto" or sizes={each}; otherwise make them equal'
    return "pass tensors of the same shape on every rank"


_BACKWARD_STATUS = {
    0: "under torch.no_grad(), in a torch.func transform of other inputs, or in a compiled program",
    NEEDS_BACKWARD: "its operand requires grad",
    CAN_BACKWARD: "its operand requires no gradient",
    NEEDS_BACKWARD | CAN_BACKWARD: "its operand requires grad",
}


def call_check(verb: str, axis: str, text: str) -> OpCallCheck:
    """The check of a call that has no op.

    Args:
        verb: the verb that is called, for the error.
        axis: the axis, for the error.
        text: description of the call; it has to be the same on every rank.
    """
    return OpCallCheck(Signature.of(verb, axis, text), None)


def refusal_text(error: Exception) -> str:
    """What a rank that aborts its call reports to the others: the error and its call site."""
    return f"{type(error).__name__} {show_site(call_site())}: {error}"
