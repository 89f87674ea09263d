"""Call checks: what the ranks compare about a call, so that mismatched calls raise on every rank.

Each call that sends has a sequence number in its group, the same on all ranks. A backward call includes the number of
its forward call: otherwise two backward calls of the same kind and shape could be mispaired where ranks use outputs
differently. Calls that send nothing but whose backward sends are numbered too, and checked with the next call that
sends.

The transports exchange what is compared: see `process_group.py` here, `Lockstep.agree` in backends/shm/engine.py and
`_compare` in backends/threads/rendezvous.py.

In addition, each rank reports whether its call will have a backward: see `NEEDS_BACKWARD`.
"""

from __future__ import annotations

import cmath
import contextlib
import hashlib
import itertools
import os
import re
import threading
import warnings
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh._torch import LastPass, backward_pass, function_backward, function_forward, in_plain_mode
from gradmesh._util.caches import BoundedCache
from gradmesh._util.call_sites import Site, call_site, show_site
from gradmesh.backends.own_group import FLAGS, CallCheck, OwnGroup, not_responding, unresponsive
from gradmesh.errors import CheckWarning, GradmeshError, MismatchError, message
from gradmesh.ops.transport import bytes_of, dense
from gradmesh.runtime.mesh import Axis
from gradmesh.runtime.state import rank_state
from gradmesh.transport.packing import with_memory
from gradmesh.types import I, P, R, Type


class BitField(NamedTuple):
    """A number within the flags of a call.

    >>> BitField(4, 3).read(BitField(4, 3).pack(5) | 0b1111)
    5
    """

    shift: int
    bits: int

    @property
    def most(self) -> int:
        """The largest number."""
        return (1 << self.bits) - 1

    def pack(self, number: int) -> int:
        """The number as flags."""
        return number << self.shift

    def read(self, flags: int) -> int:
        """The number within flags."""
        return flags >> self.shift & self.most


# The flags of a call: at most the bits of `gradmesh.backends.own_group.FLAGS`, which the ranks exchange with the
# hash of the call and do not compare.
NEEDS_BACKWARD = 1 << 0
"""This rank will run the call's backward."""
CAN_BACKWARD = 1 << 1
"""This rank can run the call's backward if another rank needs it."""
ZERO_GRAD = 1 << 2
"""This rank has no gradient, and passes zeros."""
DEFERRED = 1 << 3
"""Of a forward call: this rank defers its backward reduction (`no_sync`)."""
_NOT_FINITE = 1 << 4
"""This rank's operand contains a NaN or an infinity."""
_LINE = BitField(5, 9)
"""A hash of the source line of the call."""
_CHECKSUM = BitField(14, 20)
"""The checksum of the operand's values, where they are compared."""
_FIRST, _MORE = BitField(14, 10), BitField(24, 10)
"""Elsewhere the calls in the forward of a Function: 1 + the first sequence number, 0 if unknown; how many follow."""

_KEPT = 1 << 14
_LOGGED = 1 << 22
"""Numbers in a log are sent modulo this."""


@dataclass(slots=True)
class FunctionCalls:
    """The calls in one forward of a Function."""

    first: int  # the sequence number of its first call
    last: int  # that of the last call before another node was made
    text: str  # description of the first call
    site: Site  # its call site

    def __str__(self) -> str:
        made = f"call {self.first}: {self.text} {show_site(self.site)}"
        return f"in the backward of the autograd.Function that made {made}"


class _Thread(threading.local):
    """A token per thread; thread ids are reused."""

    def __init__(self) -> None:
        self.token = object()


_here = _Thread()


class Functions:
    """The calls of verbs in user-written autograd Functions on a group, on this rank.

    Two calls of such a Function could have their backward calls mispaired where ranks use the results differently. So
    the sequence numbers of the calls in the Function's forward are stored under its node's number, and sent as flags
    with the call in its backward. They are hints: two ranks that both know theirs must have a call in common; an
    unknown one matches anything, since a rank may not be able to find its node.

    Autograd numbers nodes per thread, so only the first thread that calls is tracked.
    """

    __slots__ = ("_made", "_thread")

    def __init__(self) -> None:
        self._made: OrderedDict[int, FunctionCalls] = OrderedDict()
        self._thread: object = None

    def __len__(self) -> int:
        return len(self._made)

    def note(self, node: int, place: int, text: str) -> None:
        """Store a call of a Function's forward; the oldest Functions are evicted."""
        if self._thread is None:
            self._thread = _here.token
        if self._thread is not _here.token:
            return
        if (known := self._made.get(node)) is not None:
            known.last = place
            return
        self._made[node] = FunctionCalls(place, place, text, call_site())
        if len(self._made) > _KEPT:
            self._made.popitem(last=False)

    def of(self, node: int) -> FunctionCalls | None:
        """The calls in the forward of a node's Function, if known."""
        return self._made.get(node) if self._thread is _here.token else None


def encode_flags(made: FunctionCalls) -> int:
    """The sequence numbers as flags."""
    return _FIRST.pack(1 + made.first % _FIRST.most) | _MORE.pack(min(made.last - made.first, _MORE.most))


def _read(flags: int) -> tuple[int, int] | None:
    """First sequence number and how many follow; None where unknown."""
    first = _FIRST.read(flags)
    return (first - 1, _MORE.read(flags)) if first else None


def conflicting(peer_flags: Sequence[int]) -> bool:
    """Whether two ranks run the backward of Functions that have no call in common.

    >>> one, both = encode_flags(FunctionCalls(7, 7, "", None)), encode_flags(FunctionCalls(7, 8, "", None))
    >>> conflicting([one, both, 0]), conflicting([one, encode_flags(FunctionCalls(8, 8, "", None))])
    (False, True)
    """
    known = {read for flags in peer_flags if (read := _read(flags)) is not None}
    return any(
        (other - first) % _FIRST.most > more and (first - other) % _FIRST.most > further
        for (first, more), (other, further) in itertools.combinations(known, 2)
    )


def show_flags(peer_flags: Sequence[int], own: FunctionCalls | None) -> str:
    """One line per rank: the call whose backward it runs; the numbers, of which the flags have 10 bits, by `own`."""
    lines = []
    for rank, flags in enumerate(peer_flags):
        read = _read(flags)
        if read is None:
            lines.append(f"rank {rank}: unknown")
            continue
        most = _FIRST.most
        place = read[0] if own is None else own.first + (read[0] - own.first + most // 2) % most - most // 2
        lines.append(f"rank {rank}: in the backward of the autograd.Function that made call {place}")
    return "\n".join(lines)


BACKWARD = "the backward of"
TANGENT = "the tangent of"
_ROLE_NUMBER = {"": 0, BACKWARD: 1, TANGENT: 2}

_ORDERED = (
    "run forward and backward inside `with gradmesh.ordered():`, and end the block with gradmesh.backward(loss) on "
    "every rank: it runs the backward of every call in the same order, also where the loss does not use the result"
)
_ON_ONE_THREAD = (
    "for second derivatives on a device, run every backward in "
    "`with torch.autograd.set_multithreading_enabled(False):`, since each thread numbers its nodes, also for what one "
    "rank alone did before; where the ranks' losses differ, "
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
        """Make one from its text, the same on every rank; what may differ, `own`, is only for the error."""
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return cls(verb, axis, text + own, int.from_bytes(digest, "little", signed=True))


class DefersReduction(Protocol):
    """Defers the reduction of a backward call."""

    def defers(self, node: Any, grad: Tensor | None) -> bool:
        """Defer this gradient of a node's result; False: it has to be reduced now."""


@dataclass(slots=True, eq=False)
class CallRecord:
    """Metadata of one call on this rank."""

    role: str = ""  # `BACKWARD` or `TANGENT` of `origin`; "" for a forward call
    origin: CallRecord | None = None  # the forward call that this call belongs to
    flags: int = 0  # `NEEDS_BACKWARD`, `CAN_BACKWARD`, and `ZERO_GRAD` or `DEFERRED`
    ordered: bool = False  # whether it is an ordered op, inside `ordered()`
    number: int = 0  # its sequence number among the compared calls of the group; 0: not compared
    local: int = 0  # its number among the calls since then that send nothing; 0: it sends
    text: str = ""  # description of the call
    site: Site = None  # its call site
    peer_flags: Sequence[int] | None = None  # the flags of every rank, if they differ
    # in a traced program, its sequence number as a tensor that exists when the program runs
    traced: Tensor | None = None
    logged: int = 0  # its number in the log of the deferred check; 0: it is compared before it is made
    deferral: DefersReduction | None = None  # defers the gradient reduction instead of sending in backward

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
        return self.number > 0 and not self.logged and all(f & ZERO_GRAD for f in flags)

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

    __slots__ = (
        "first_messages",
        "functions",
        "gloo",
        "local",
        "local_digest",
        "lock",
        "log",
        "memos",
        "met",
        "number",
        "words",
    )

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Held during a call that is compared: threads must not interleave their calls on one group.
        self.lock = threading.RLock()
        self.number = self.met = 0  # how many calls were compared, and how many of these at once
        self.local = 0  # how many calls since then sent nothing but have a backward that sends
        self.local_digest = 0  # a digest of those
        self.words: list[str] = []
        self.memos = BoundedCache()  # the memos of ops, where the group does not keep its ops
        self.functions = Functions()  # user-written autograd Functions that call verbs
        # memory for the first messages of a call, which the next one uses
        self.first_messages: list[Any] = []
        self.log: Any = None  # the log of the deferred check, if a call on the group was deferred
        self.gloo = False  # whether the group sends CPU tensors over Gloo
        with contextlib.suppress(TypeError, ValueError):  # torch did not make it
            self.gloo = "cpu:gloo" in dist.get_backend_config(group)

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
    kept = getattr(group, "calls", None)  # by the groups of gradmesh, for small calls
    found: Calls | None = kept if type(kept) is Calls else _counted.get(group)
    if found is None:
        found = _counted[group] = Calls(group)
        if isinstance(group, OwnGroup):
            group.calls = found
    return found


def calls_at_once() -> dict[str, int]:
    """How many calls were compared at once on each group, by its name."""
    return {g.group_name: calls_of(g).met for ref in _counted.keyrefs() if (g := ref()) is not None}


class OpCallCheck(CallCheck):
    """The check of one call of an op, with the call's metadata, `recorded`; None where no backward can be recorded.

    If `deferred`, the ranks compare it after it was made; the first call of each verb, or `by_shape` of each shape and
    dtype, is compared before it is made nevertheless.
    """

    __slots__ = (
        "_backward_node",
        "_forward_node",
        "_function_calls",
        "_preceding",
        "_signature",
        "by_shape",
        "calls",
        "deferred",
        "recorded",
        "refused",
        "site",
    )

    sends_positions: bool = True
    """Whether the flags have room for the sequence numbers of manual calls."""
    calls: Calls
    """The counter of the calls on the group, set when the transport is chosen."""

    def __init__(
        self,
        signature: Signature,
        recorded: CallRecord | None,
        *,
        deferred: bool = False,
        by_shape: bool = False,
    ) -> None:
        self.deferred, self.by_shape = deferred, by_shape
        self.refused = ""  # why this rank aborted it, if deferred
        self.site: Site = None  # its call site, if deferred
        self.digest = signature.digest
        self.flags = 0 if recorded is None else recorded.flags
        self.peer_flags = None
        self._signature, self.recorded = signature, recorded
        self._preceding: list[str] = []
        self._function_calls: FunctionCalls | None = None
        # Looked up now, because transports switch autograd off. A call of gradmesh's own nodes has a record.
        self._backward_node = None
        if backward_pass() != -1 and (recorded is None or recorded.origin is None):
            self._backward_node = function_backward()
        self._forward_node = function_forward() if recorded is None else None

    @property
    def verb(self) -> str:
        """The verb that is called."""
        return self._signature.verb

    def count(self) -> None:
        """Assign the sequence number, and add that of the forward call to the digest."""
        calls = self.calls
        calls.number += 1
        if self._backward_node is not None and self.sends_positions:
            self._function_calls = calls.functions.of(self._backward_node)
            self.flags |= 0 if self._function_calls is None else encode_flags(self._function_calls)
        if self._forward_node is not None:
            calls.functions.note(self._forward_node, calls.number, self._signature.text)
        of: tuple[int, ...] = ()
        if (recorded := self.recorded) is not None:
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
        if self.recorded is not None:
            self.recorded.peer_flags = peer_flags
        self._verify(peer_flags)

    def _verify(self, peer_flags: Sequence[int]) -> None:
        if self.sends_positions and conflicting(peer_flags):
            self._refuse(
                "the ranks run the backward of different calls of an autograd.Function",
                expected="the backward of the same call on every rank, in the same order",
                got=show_flags(peer_flags, self._function_calls),
                remedy=_OUTSIDE,
            )
        if _cannot_join(peer_flags):
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
        raise MismatchError.of(
            problem,
            op=self._signature.verb,
            axis=self._signature.axis,
            expected=expected,
            got=f"{got}\nin {self.said()}",
            remedy=remedy,
        )

    def said(self) -> str:
        """The call, its call site, its forward call, and the calls before it that sent nothing."""
        if self.refused:
            return self.refused
        text = f"{self._signature.text} {show_site(self.site if self.deferred else call_site())}"
        if self.recorded is not None:
            text += self.recorded.of()
        if self._function_calls is not None:
            text += f", {self._function_calls}"
        return f"{text}, after {' and '.join(self._preceding)}" if self._preceding else text

    @property
    def kind(self) -> int:
        """A number that differs between calls of which the first is compared before it is made.

        That is between verbs, or signatures, and between forward and the passes of backward.
        """
        role, origin = ("", None) if self.recorded is None else (self.recorded.role, self.recorded.origin)
        what = self._signature.digest if self.by_shape else self.verb
        return hash((what, role, None if origin is None else origin.role))

    @property
    def logged_origin(self) -> int:
        """The number in the log of the call that it is the backward of; 0: none."""
        record = self.recorded
        if record is None or record.origin is None or record.role != BACKWARD:
            return 0
        return record.origin.logged % _LOGGED

    def mismatch(self, words: list[str], flags: Sequence[int] | None) -> Exception:
        """The error of the deferred check: the calls, described in rank order, differ, or the flags conflict."""
        if flags is not None:
            try:
                self._verify(flags)
            except MismatchError as error:
                return error
        return self.refusal(words, deferred=True)

    def refusal(self, words: list[str], deferred: bool = False) -> Exception:
        """One table: what each rank called, where, and the remedy."""
        if any(f", {BACKWARD} call " in said for said in words):
            expected = "the backward of the same call on every rank, in the same order"
            twice = deferred and any(said.count(f", {BACKWARD} call ") > 1 for said in words)
            remedy = (_ON_ONE_THREAD if twice else "") + _ORDERED
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
        return MismatchError.of(
            "the ranks' calls do not match",
            op=self._signature.verb,
            axis=self._signature.axis,
            expected=expected,
            got="\n".join(f"rank {rank}: {said}" for rank, said in enumerate(words)),
            remedy=remedy,
        )


class MessageCheck(OpCallCheck):
    """The check of one end of a message off the CPU, which the deferred check of the two ranks compares.

    `greeting` is the description of the message; it has to be the same on both ends.
    """

    __slots__ = ("_ends", "balance")

    def __init__(self, verb: str, axis: Axis, peer: int, greeting: str) -> None:
        sends = verb == "send"
        ends = (axis.rank, peer) if sends else (peer, axis.rank)
        said = Signature.of(verb, str(axis), f"{greeting} from rank {ends[0]} to rank {ends[1]}")
        text = f"{verb}({'to' if sends else 'source'}={peer}) of {greeting}"
        super().__init__(replace(said, text=text), None, deferred=True)
        self._ends = sorted(ends)
        self.balance = 1 if sends else RECEIVES

    def refusal(self, words: list[str], deferred: bool = False) -> Exception:  # noqa: ARG002 - it always is
        """What both ranks did, where, and the remedy."""
        verbs = {said.partition("(")[0] for said in words}
        if verbs == {"send", "recv"}:
            remedy = (
                "make the messages between two ranks in one order on both, and pass the same shape and dtype"
            )
        elif verbs in ({"send"}, {"recv"}):
            pairs = [tuple(self._ends), tuple(self._ends[::-1])]
            remedy = (
                f"{'receive' if verbs == {'send'} else 'send'} first on one of the ranks, since off the CPU a message "
                f"waits for its other end; gradmesh.permute(x, pairs={pairs}) sends both ways at once"
            )
        else:
            remedy = "fix the error reported above"
        return MismatchError.of(
            "the messages of two ranks do not match",
            op=self.verb,
            axis=self._signature.axis,
            expected="where one rank sends, the other one receives, with the same shape and dtype",
            got="\n".join(f"rank {rank}: {said}" for rank, said in zip(self._ends, words, strict=True)),
            remedy=remedy,
        )


RECEIVES = -1
"""The checksum of a `recv`, which cancels that of the `send`."""


def _cannot_join(peer_flags: Sequence[int]) -> bool:
    """Whether some rank will run the backward of a call, and another one cannot."""
    return any(flags & NEEDS_BACKWARD for flags in peer_flags) and not all(
        flags & (NEEDS_BACKWARD | CAN_BACKWARD) for flags in peer_flags
    )


def without_backward(peer_flags: Sequence[int]) -> list[int]:
    """The ranks that run no backward of a call that others run: their operand requires no gradient."""
    if not any(flags & NEEDS_BACKWARD for flags in peer_flags):
        return []
    both = NEEDS_BACKWARD | CAN_BACKWARD
    return [rank for rank, flags in enumerate(peer_flags) if flags & both == CAN_BACKWARD]


def flags_conflict(peer_flags: Sequence[int]) -> bool:
    """Whether the flags of the ranks are an error; see `OpCallCheck.settle`."""
    return conflicting(peer_flags) or _cannot_join(peer_flags)


_SAME_OPERANDS = "the same call, with operands of the same dtype and sizes, on every rank"
_DEFERRED_CALL = "made of reductions deferred by no_sync()"
_CALL = re.compile(r"(\w+)\((.*?)\) of (\w+)\[([\d, ]*)\]")
_QUERIES = re.compile(
    r"made of nn\.ulysses_attention\(.*, sizes=equal.*\), query_sizes=\((\d+)(?:, \1)*\) with "
)
_HALOS = re.compile(r"halo_exchange\(.*sizes=\((\d+)(?:, \1)*\)")
"""The call of a halo exchange without sizes, which takes this rank's size for all."""
_PLACES = re.compile(r" at \S+:\d+ in \S+")


def _preceding(said: str) -> str:
    """The preceding calls that send nothing, without their call sites, which may differ."""
    return _PLACES.sub("", said.partition(", after ")[2])


def _remedy(words: Sequence[str]) -> str:
    """The remedy for calls that differ."""
    for pattern in (_QUERIES, _HALOS):
        own = [found[1] for found in map(pattern.search, words) if found]
        if len(own) == len(words) and len(set(own)) > 1:
            return _if_uneven("sizes", map(int, own))
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
        return _if_uneven("sizes", each)
    joined = re.search(r"\bconcat_dim=(\d+)", text)
    if "concat_sizes=equal" in text and joined is not None and differ == [int(joined[1])]:
        return _if_uneven("concat_sizes", (one[differ[0]] for one in sizes))
    return "pass tensors of the same shape on every rank"


def _if_uneven(name: str, sizes: Iterable[int]) -> str:
    each = tuple(sizes)
    return f'if the sizes differ on purpose, pass {name}="auto" or {name}={each}; otherwise make them equal'


_BACKWARD_STATUS = {
    0: "under torch.no_grad(), in a torch.func transform of other inputs, or in a compiled program",
    NEEDS_BACKWARD: "its operand requires grad",
    CAN_BACKWARD: "its operand requires no gradient",
    NEEDS_BACKWARD | CAN_BACKWARD: "its operand requires grad",
}


def call_check(verb: str, axis: str, text: str) -> OpCallCheck:
    """The check of a call that has no op, whose description, `text`, has to be the same on every rank."""
    return OpCallCheck(Signature.of(verb, axis, text), None)


def refusal_text(error: Exception) -> str:
    """What a rank that aborts its call reports to the others: the error and its call site."""
    return f"{type(error).__name__} {show_site(call_site())}: {error}"


_WHOLE = 1 << 64


@lru_cache(maxsize=4096)
def _number(source: int, target: int, amount: int) -> int:
    text = f"{source} gives {target} {amount}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & ~FLAGS


def balance(rank: int, send: Sequence[int], receive: Sequence[int]) -> int:
    """A rank's checksum of the numbers of elements that it sends to each rank and receives from each.

    Each (source, target, count) has a 64-bit hash. A rank adds the hashes of what it sends and subtracts those of what
    it receives. Counts that agree cancel, so that the checksums of all ranks add up to 0, and almost never otherwise.
    The checksum is added to the call digest that the ranks exchange anyway; its flag bits stay untouched.

    >>> sum(balance(r, send, take) for r, send, take in ((0, (1, 2), (1, 4)), (1, (4, 3), (2, 3)))) % 2**64
    0
    >>> sum(balance(r, send, take) for r, send, take in ((0, (1, 2), (1, 5)), (1, (4, 3), (2, 3)))) % 2**64 == 0
    False
    """
    gives = sum(_number(rank, other, amount) for other, amount in enumerate(send))
    takes = sum(_number(other, rank, amount) for other, amount in enumerate(receive))
    return (gives - takes) % _WHOLE


def agreed(heads: Sequence[int], own: int) -> bool:
    """Whether all ranks' call digests are equal and their count checksums cancel.

    `heads` are every rank's digest plus checksum, with its flags; `own` is this rank's digest alone.

    >>> one = FLAGS + 1
    >>> agreed([one, one + 1], one), agreed([2 * one, 0], one), agreed([one, 2 * one], one)
    (True, True, False)
    """
    return (sum(map((~FLAGS).__and__, heads)) - len(heads) * own) % _WHOLE == 0


def signed(number: int) -> int:
    """An unsigned 64-bit number as a signed one.

    >>> signed(2**64 - 1), signed(2**64 + 3)
    (-1, 3)
    """
    number %= _WHOLE
    return number - _WHOLE if number >= _WHOLE >> 1 else number


_LANES = 64


class ReplicatedLossPass(LastPass):
    """The backward pass of a loss declared with `loss_type=gm.R`, which `gradmesh.objective` scaled."""


def checksum(x: Tensor) -> int:
    """A 20-bit checksum that depends on the order of the elements; 0 for zeros."""
    return int.from_bytes(bits_of(x, 4), "little") & _CHECKSUM.most


def bits_of(x: Tensor, size: int) -> bytes:
    """A digest of `size` bytes of a tensor's bits; all zero for zeros and empty tensors.

    64-bit words are summed in lanes, which runs at memory bandwidth.
    """
    if not x.numel():
        return bytes(size)
    memory = bytes_of(with_memory(dense(x)))
    if memory.storage_offset() % 8:
        memory = memory.clone()
    whole = memory.numel() // (8 * _LANES) * (8 * _LANES)
    lanes = memory[:whole].view(torch.int64).view(-1, _LANES).sum(0).tolist() if whole else []
    rest = memory[whole:].tolist()
    if not any(lanes) and not any(rest):
        return bytes(size)
    return hashlib.blake2b(array("q", lanes).tobytes() + bytes(rest), digest_size=size).digest()


def _finite(x: Tensor) -> bool:
    if not (x.is_floating_point() or x.is_complex()):
        return True
    if x.itemsize == 1 or x.dtype is torch.complex32:  # torch has no arithmetic for these
        x = x.to(torch.complex64 if x.is_complex() else torch.float32)
    # A sum takes a tenth of the time of isfinite on every element.
    return cmath.isfinite(x.sum().item()) or bool(torch.isfinite(x).all())


def _line() -> int:
    """A 9-bit hash of the source line of the call."""
    site = call_site()
    if site is None:
        return 0
    text = f"{os.path.basename(site[0].co_filename)}:{site[1]}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=2).digest(), "little") & _LINE.most


class ValueCheck(OpCallCheck):
    """The check of one call and of its operand's values; `src` is the operand's type over the ranks, if it has one.

    A checksum of the operand, whether it contains a NaN or an infinity, and a hash of the call's source line are sent
    with the call check. Bits are compared without a tolerance: ranks that repeat the same work on one machine get the
    same bits.
    """

    __slots__ = ("_src", "sends_positions")

    def __init__(
        self, signature: Signature, recorded: CallRecord | None, x: Tensor, src: Type | None
    ) -> None:
        super().__init__(signature, recorded)
        self._src = src
        counts = src in (R, I) or self._summed
        self.sends_positions = not counts
        finite, number = in_plain_mode(lambda: (_finite(x), checksum(x) if counts else 0))
        self.flags |= (0 if finite else _NOT_FINITE) | _LINE.pack(_line()) | _CHECKSUM.pack(number)

    @property
    def _backward(self) -> bool:
        return self.recorded is not None and self.recorded.role == BACKWARD

    @property
    def _summed(self) -> bool:
        """Whether the operand is a gradient that this call sums over the ranks."""
        return self._backward and self._src is P

    def settle(self) -> None:
        """Check the flags and values of the other ranks.

        Raises:
            MismatchError: values that are declared the same on every rank differ.
        """
        super().settle()
        flags = self.flags
        peer_flags = self.peer_flags
        numbers = (
            {_CHECKSUM.read(flags)} if peer_flags is None else {_CHECKSUM.read(other) for other in peer_flags}
        )
        if self._src in (R, I) and peer_flags is not None and len(numbers) > 1:
            raise self._unequal(peer_flags)
        if (
            self._summed
            and numbers == {_CHECKSUM.read(flags)} != {0}
            and not rank_state().get_or_create(ReplicatedLossPass).running
        ):
            self._warn("a gradient that is the same on every rank is summed over the ranks", _SUMMED)
        if peer_flags is not None and len({_LINE.read(other) for other in peer_flags}) > 1:
            self._warn("the ranks make this call at different source lines", _ELSEWHERE)
        if flags & _NOT_FINITE or (
            peer_flags is not None and any(other & _NOT_FINITE for other in peer_flags)
        ):
            ranks = (
                [rank for rank, other in enumerate(peer_flags) if other & _NOT_FINITE]
                if peer_flags
                else ["all"]
            )
            self._warn(
                f"the operand contains a NaN or an infinity, on rank {', '.join(map(str, ranks))}", _SPOILT
            )

    def _unequal(self, peer_flags: Sequence[int]) -> MismatchError:
        problem = (
            f"dst=gm.{self._src} promises the same gradient on every rank, but the gradients differ"
            if self._backward
            else f"a gm.{self._src} operand has to be the same on every rank, but the values differ"
        )
        remedy = (
            "if the ranks use the result differently, pass dst=gm.R, whose backward sums the ranks' gradients; if they "
            "repeat the same work, find what makes it differ (data, dropout, the order of a sum)"
        )
        return MismatchError.of(
            problem,
            op=self._signature.verb,
            axis=self._signature.axis,
            expected="bitwise equal values on every rank",
            got="\n".join(
                f"rank {rank}: checksum {_CHECKSUM.read(other)}" for rank, other in enumerate(peer_flags)
            )
            + f"\nin {self.said()}",
            remedy=remedy
            if self._backward
            else "pass the same values on every rank (seed them alike, or gm.broadcast them from rank 0)",
        )

    def _warn(self, problem: str, remedy: str) -> None:
        site = call_site()
        text = message(
            problem, op=self._signature.verb, axis=self._signature.axis, got=self.said(), remedy=remedy
        )
        place = ("<unknown>", 0) if site is None else (site[0].co_filename, site[1])
        warnings.warn_explicit(text, CheckWarning, *place)


_SUMMED = (
    "if every rank repeats the same work on the result, this gradient is world_size times too large: pass dst=gm.I; if "
    "the loss is the sum of the ranks' losses, it is right"
)
_ELSEWHERE = (
    "if the ranks make two calls of the same kind in a different order, make the order the same; a branch that makes "
    "the same call on every rank is right"
)
_SPOILT = "find the operation that produced it on that rank, for example with torch.autograd.detect_anomaly()"


_GRACE = 0.4
"""Seconds that the other ranks get to respond; they notice a lost connection at nearly the same time."""


def raise_for_failed_ranks(axis: Axis, error: RuntimeError) -> None:
    """Raise an error of a backend, such as a closed connection, as one that names the ranks that failed, if some did.

    A rank whose call failed sets a key in the group's store and checks which other ranks set theirs. A rank that has
    exited, has returned or is busy elsewhere sets none.

    Raises:
        AbortedError: the backend failed, and some ranks of the axis did not respond.
    """
    missing: list[int] = []
    if not isinstance(error, GradmeshError):
        with contextlib.suppress(Exception):  # the group has no store
            store: Any = axis.group.get_group_store()
            missing = unresponsive(store, axis.rank, axis.size, _GRACE)
    if missing:
        raise not_responding([axis.global_ranks[rank] for rank in missing], error, str(axis)) from error
