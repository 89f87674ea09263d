"""The state of one `typed` block on one rank, and the numbers by which ranks compare values.

Bottom up: 64-bit numbers of a tensor's bits and of the operators that made it (equal numbers mean equal bits, on any
rank); the values of the tensors that are alive, with the writes to their memory; findings, and the conditions under
which they hold; the numbers that every rank of an axis has sent, which travel only with collectives, `assert_type` and
the end of the block; and `Tracker`, which holds all of these.
"""

from __future__ import annotations

import cmath
import contextlib
import ctypes
import dataclasses
import hashlib
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradmesh._torch import in_backward, is_fake, version_of
from gradmesh._util.call_sites import Site, call_site, show_site
from gradmesh.autograd.missing_sums import MISSING_SUM
from gradmesh.errors import CheckWarning, MismatchError, TypeMismatchError, message
from gradmesh.ops.all_gather import AllGather
from gradmesh.ops.sizes import EQUAL
from gradmesh.runtime.mesh import Axis
from gradmesh.transport.run import apply
from gradmesh.type_inference import rules
from gradmesh.type_inference.rules import SAMES, UNKNOWN, ZERO, I, Kind, P, R, S, V, flavor, shown
from gradmesh.types import Type


def token(*words: object) -> int:
    """64 bits of words and numbers.

    >>> token("add", 1) == token("add", 1) != token("add", 2)
    True
    """
    made = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(made, "little", signed=True)


def said(value: Any) -> object:
    """An argument other than a tensor, as a value that is equal on ranks that pass equal arguments."""
    if isinstance(value, list | tuple):
        return [said(one) for one in value]
    if isinstance(value, torch.device):
        return value.type
    if value is None or isinstance(
        value, bool | int | float | complex | str | torch.dtype | torch.layout | torch.memory_format
    ):
        return str(value) if isinstance(value, torch.dtype) else value
    return type(value).__name__


def within(x: Tensor) -> Tensor:
    """The tensor with memory that another one wraps: a DTensor's own part, what a functional collective returns."""
    while _wraps(x) and hasattr(x, "__tensor_flatten__"):
        if hasattr(x, "trigger_wait"):  # it may be under way
            x.trigger_wait()
        parts = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if len(tensors) != 1:
            break
        x = tensors[0]
    return x


def _wraps(x: Tensor) -> bool:
    return type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__


def observable(x: Tensor) -> bool:
    """Whether a tensor's bits can be read: it has its own memory, and a value at each position of it."""
    plain = x.layout is torch.strided and not x.is_quantized and not x.is_nested
    if not plain or x.device.type == "meta" or _wraps(x) or is_fake(x):
        return False
    return not x.numel() or x.untyped_storage().nbytes() > 0  # FSDP frees the memory of gathered parameters


def number_of_bits(x: Tensor) -> int:
    """A 64-bit digest of a tensor's memory, dtype, shape and strides.

    >>> x = torch.tensor([0.0, 1.0])
    >>> number_of_bits(x) == number_of_bits(x.clone()) != number_of_bits(x.flip(0))
    True
    """
    whole = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
    length = whole.numel() * whole.itemsize
    memory = (ctypes.c_char * length).from_address(whole.data_ptr()) if length else b""
    made = hashlib.blake2b(memory, digest_size=8)
    made.update(f"{x.dtype} {tuple(x.shape)} {x.stride()}".encode())
    return int.from_bytes(made.digest(), "little", signed=True)


def same_summed(value: Any) -> bool:
    """Whether the sum of a value over ranks that all have it is the value: every element is 0, infinite or NaN.

    >>> same_summed(float("-inf")), same_summed(torch.tensor([0.0, -torch.inf])), same_summed(1.0)
    (True, True, False)
    """
    if isinstance(value, Tensor):
        return observable(value) and not bool(((value != 0) & value.isfinite()).any())
    return isinstance(value, int | float | complex) and (not value or not cmath.isfinite(value))


DEEPEST = 20_000
"""The maximum number of operators from a value back to its origin; longer chains, as of a long training, are cut."""


class Mark(NamedTuple):
    """What a tensor is over one axis, as one rank sees it."""

    kind: Kind  # a type, which holds if `number` is found on every rank
    number: int  # what made the value, in 64 bits; 0 where the kind has nothing that ranks could compare


@dataclass(slots=True, eq=False)
class Node:
    """One value: a tensor between two writes."""

    op: str  # the operator that made it; "" for what came from outside
    site: Site  # the line of the user's code
    inputs: tuple[Node, ...]  # the values that it is made of
    marks: tuple[Mark, ...]  # one for each axis
    leaf: bool = False  # whether it is a leaf that requires grad, and so a parameter
    collective: bool = False  # whether a collective made it
    depth: int = 0  # the length of the longest chain of inputs
    declared: bool = False  # whether `assert_type` declared it
    learns: bool = False  # whether that has a backward on this rank
    shape: tuple[int, ...] = ()  # the tensor's

    def __post_init__(self) -> None:
        self.depth = 1 + max((one.depth for one in self.inputs), default=0)
        if self.depth > DEEPEST:
            self.inputs, self.depth = (), 1

    def replicated(self, at: int) -> Node | None:
        """What made it R over an axis: the nearest collective, or declaration, whose gradient is summed there."""
        return next(
            (node for node in self.before(lambda one: one.marks[at].kind == "R") if node.learns), None
        )

    def before(self, through: Callable[[Node], bool] = lambda _: True) -> Iterator[Node]:
        """This value and all that it is made of, the nearest first."""
        seen, row = {id(self)}, [self]
        for node in row:  # grows
            yield node
            for one in node.inputs:
                if id(one) not in seen and through(one):
                    seen.add(id(one))
                    row.append(one)


class Region(NamedTuple):
    """Which elements of its memory a tensor is, in bytes."""

    first: int  # where it begins
    last: int  # the last byte
    shape: tuple[int, ...]  # its sizes, the bytes of an element as the last one
    stride: tuple[int, ...]  # its strides in bytes
    size: int  # of an element

    @classmethod
    def of(cls, x: Tensor) -> Region:
        """That of a tensor."""
        size = x.itemsize
        first, stride = int(x.storage_offset()) * size, tuple(size * int(n) for n in x.stride())
        last = first + sum(max(0, n - 1) * by for n, by in zip(x.shape, stride, strict=True)) + size - 1
        return cls(first, last if x.numel() else first - 1, tuple(x.shape), stride, size)

    def meets(self, other: Region) -> bool:
        """Whether they may have an element in common."""
        return self.first <= other.last and other.first <= self.last

    def places(self, start: int, unit: int) -> Tensor:
        """The numbers of its elements, counted from a byte on in a unit that is not larger."""
        steps = torch.arange(self.size // unit, device="cpu")
        found = steps + (self.first - start) // unit
        for n, by in zip(reversed(self.shape), reversed(self.stride), strict=True):
            found = (torch.arange(n, device="cpu") * (by // unit)).unsqueeze(1) + found.reshape(1, -1)
        return found.reshape(-1)


def visible(mine: Region, written: Sequence[Region]) -> Tensor:
    """Which of several writes, each over those before it, each element of a region shows; -1 is what lay there before.

    >>> visible(Region.of(torch.ones(4)), [Region.of(torch.ones(2)), Region.of(torch.ones(1))]).tolist()
    [1, 0, -1, -1]
    """
    every = [mine, *written]
    start, end = min(one.first for one in every), max(one.last for one in every) + 1
    unit = math.gcd(*(n for one in every for n in (one.size, one.first - start, *one.stride)))
    latest = torch.full(((end - start + unit - 1) // unit,), -1, dtype=torch.int32, device="cpu")
    for number, one in enumerate(written):
        latest[one.places(start, unit)] = number
    return latest[mine.places(start, unit)].view(-1, mine.size // unit)[:, 0]


class Patch(NamedTuple):
    """What was written into a part of a tensor's memory through another tensor."""

    region: Region
    node: Node


@dataclass(slots=True, eq=False)
class _Kept:
    """What is known of a tensor."""

    ref: weakref.ref[Tensor]  # the tensor
    node: Node  # its value, when it was kept
    patches: tuple[Patch, ...]  # what was written there since then, through other tensors
    first: int  # the least version for which this holds
    last: int  # the greatest one
    writes: int  # how many unknown writes to its memory there had been
    memory: int  # where it lies


class Values:
    """The values of the tensors that are alive.

    A write through one tensor is noted as a patch for every other one of the same memory. A tensor that was written
    outside of the tracer, or by something without a type, has no value any more: its version, or the writes to its
    memory, show it.
    """

    def __init__(self) -> None:
        self._of: dict[int, _Kept] = {}
        self._at: dict[int, set[int]] = {}
        self._writes: dict[int, int] = {}

    def find(self, x: Tensor) -> tuple[Node, tuple[Patch, ...]] | None:
        """The value of a tensor, and what was written over it since then; None: that is not known."""
        kept = self._of.get(id(x))
        if kept is None or kept.ref() is not x or not self._holds(kept, x):
            return None
        return kept.node, kept.patches

    def _holds(self, kept: _Kept, x: Tensor) -> bool:
        return kept.first <= version_of(x) <= kept.last and kept.writes == self._writes.get(memory_of(x), 0)

    def keep(
        self,
        x: Tensor,
        node: Node,
        *,
        base: Tensor | None = None,
        written: int = 0,
        patches: tuple[Patch, ...] = (),
    ) -> None:
        """Remember the value of a tensor, as long as it is alive.

        When autograd is through with it, it has the version of its base, and counts the writes to its memory.
        """
        key, of, at, where = id(x), self._of, self._at, memory_of(x)

        def leave(memory: int) -> None:
            at[memory].discard(key)
            if not at[memory]:
                del at[memory]

        def forget(ref: object) -> None:
            found = of.get(key)
            if found is not None and found.ref is ref:
                del of[key]
                leave(found.memory)

        before = of.get(key)
        if before is not None and before.memory != where:
            leave(before.memory)
        version = version_of(x if base is None else base)
        writes = self._writes.get(where, 0)
        of[key] = _Kept(weakref.ref(x, forget), node, patches, version, version + written, writes, where)
        at.setdefault(where, set()).add(key)

    def wrote(self, x: Tensor, node: Node, times: int = 1) -> None:
        """Note what has just been written through a tensor: it is the value of that tensor, and a patch of others."""
        where = memory_of(x)
        if where:
            patch = Patch(Region.of(x), node)
            for key in self._at.get(where, set()) - {id(x)}:
                kept = self._of[key]
                other = kept.ref()
                if other is None or not self._holds(kept, other):
                    continue
                kept.last = max(kept.last, version_of(other) + times)
                if Region.of(other).meets(patch.region):
                    before = tuple(one for one in kept.patches if one.region != patch.region)
                    kept.patches = (*before, patch)
        self.keep(x, node, written=times)

    def written(self, x: Tensor) -> None:
        """Record that an op without types wrote to a tensor's memory, whose type is unknown from then on."""
        where = memory_of(x)
        self._writes[where] = self._writes.get(where, 0) + 1

    def leaves(self) -> list[tuple[Tensor, Node]]:
        """The parameters that are alive."""
        there = [(kept.ref(), kept.node) for kept in list(self._of.values())]
        return [(x, node) for x, node in there if x is not None and node.leaf]


def memory_of(x: Tensor) -> int:
    """Where a tensor's memory is; 0 where it has none."""
    if type(x) is not Tensor and is_fake(x):
        return 0
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


KINDS = {
    rules.NONLINEAR: (
        "a pending sum goes through an operator that is not linear",
        "sum it first: gm.all_reduce(x, dst=gm.R) or gm.reduce_scatter(x)",
    ),
    rules.PRODUCT: ("two pending sums are multiplied", "sum at least one of them first"),
    rules.VARYING: (
        "a pending sum is multiplied with what differs from rank to rank",
        "sum it first, or declare the product's type with gm.assert_type if the sum of the products is meant",
    ),
    rules.COUNTS: (
        "a value that every rank has is added to a pending sum, and counts once for each rank",
        "add it behind the sum, or gm.convert(x, src=gm.I, dst=gm.P), which keeps it at one rank",
    ),
    rules.READ: (
        "a number is made of a pending sum, of which this rank has one term",
        "sum it first: gm.all_reduce(x, dst=gm.R).item(); of a detached tensor if it is only to be shown",
    ),
    "summed-again": (
        "a value that every rank has is summed over the ranks, and counts once for each rank",
        "leave the sum out, or gm.convert(x, src=gm.I, dst=gm.P) first",
    ),
    "averaged-again": (
        "the mean is taken over the ranks of a value that every rank has: its gradient is too small by their number",
        "leave the mean out",
    ),
    "operand-type": ("the operand is not of the type that this call takes", "see docs/conventions.md"),
    "not-the-same": (
        "a value that is declared the same on every rank, is not",
        "look for what makes it differ (data, dropout, work that only some ranks do), or do not call it R or I",
    ),
    "gradient-differs": (
        "dst=gm.I says that every rank repeats the same work on the result, and the ranks' gradients differ",
        "say dst=gm.R, whose backward sums what each rank finds, or make the ranks do the same",
    ),
    "missing-sum": MISSING_SUM,
    "sum-too-many": (
        "backward begins at a loss that every rank has, and that is made of R values: it counts once for each rank",
        "pass dst=gm.I if the ranks do identical work on the result, or call gradmesh.objective(loss, loss_type=gm.R); "
        "correct as it is if gradients are averaged afterwards",
    ),
    "declared-gradient": (
        "the gradient that arrives is not of the dual type",
        "see docs/conventions.md: what is used differently on each rank is R, and its gradient has to be summed",
    ),
    "declared-otherwise": ("a tensor is declared as what it is not", "declare what it is, or convert it"),
}
"""Each kind of finding: the problem, and what to do."""


@dataclass(frozen=True)
class Finding:
    """Types that do not fit.

    Attributes:
        kind: which, one of a few words, such as "counts-many-times".
        op: the operator or verb.
        axis: the name of the axis.
        types: what the operands are, each with its shape.
        file: the file of the user's code, "" where there is none.
        line: the line in it.
        began: where what is at fault came from, as text; "" where that is the same line.
        took: what the operator takes, "" where the problem says it.
    """

    kind: str
    op: str
    axis: str
    types: str
    file: str
    line: int
    began: str = ""
    took: str = ""

    @classmethod
    def at(
        cls, kind: str, op: str, axis: str, types: str, site: Site, began: str = "", took: str = ""
    ) -> Finding:
        """Made with a call site."""
        file, line = (site[0].co_filename, site[1]) if site else ("", 0)
        return cls(kind, op, axis, types, file, line, began, took)

    def __str__(self) -> str:
        problem, remedy = KINDS[self.kind]
        got = f"{self.op} of {self.types}\nat {self.file}:{self.line}" + (
            f"\n{self.began}" if self.began else ""
        )
        return message(
            f"{problem} ({self.kind})",
            op="typed",
            axis=repr(self.axis),
            expected=self.took or None,
            got=got,
            remedy=remedy,
        )

    @property
    def short(self) -> str:
        """The kind, the operator and the line."""
        return f"{self.kind}: {self.op} at {os.path.basename(self.file)}:{self.line}"


@dataclass(frozen=True)
class Condition:
    """A finding that holds if the ranks turn out to agree, or not to."""

    finding: Callable[[], Finding]  # creates the finding
    axis: int  # the place of the axis
    present: tuple[int, ...]  # numbers that have to be found on every rank
    own: int  # a number of the finding itself, which shows whether every rank has it
    absent: tuple[int, ...] = ()  # numbers that must not, of which at least one is not
    averaged: bool = False  # whether it is none where gradients are averaged afterwards
    doubtful: str = ""  # the text of a note in place of the finding, if it may be wrong


def types_of(kinds: Sequence[tuple[Kind, tuple[int, ...]]]) -> str:
    """Types and shapes as text."""
    return ", ".join(f"{shown(kind) or 'unknown'}{list(shape)}" for kind, shape in kinds)


def began_at(op: str, site: Site) -> str:
    """Where something began, as text."""
    return f"began with {op} {show_site(site)}" if site else ""


def gathered(
    axis: Axis, numbers: Sequence[int], device: torch.device, *, operand_desc: str
) -> list[tuple[int, ...]]:
    """Every rank's numbers, as many from each."""
    with torch.no_grad():
        mine = torch.tensor(list(numbers), dtype=torch.int64, device=device)
        every = apply(AllGather(axis, 0, EQUAL, operand_desc=operand_desc), mine)
    whole = every.tolist()
    return [tuple(whole[at : at + len(numbers)]) for at in range(0, len(whole), len(numbers) or 1)]


class Agreement:
    """The numbers that were sent, by axis and rank."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.axes = axes
        self._new: list[list[int]] = [[] for _ in axes]
        self._received: list[list[set[int]]] = [[set() for _ in range(axis.size)] for axis in axes]

    def announce(self, at: int, number: int) -> None:
        """Send a number to the ranks of an axis, with the next collective."""
        mine = self._received[at][self.axes[at].rank]
        if number not in mine:
            mine.add(number)
            self._new[at].append(number)

    def agreed(self, at: int, number: int) -> bool:
        """Whether every rank of an axis has sent a number so far."""
        return all(number in numbers for numbers in self._received[at])

    def meet(
        self, axis: Axis, at: int | None, call: str, row: Sequence[Mark], device: torch.device
    ) -> list[list[Mark]]:
        """Exchange new numbers with the ranks of an axis, and return the row of marks of every rank.

        `call` is what every rank is about to do, `at` the place of the axis if it is followed.
        """
        new = self._new[at] if at is not None else []
        # The same length on each rank, so that ranks that diverge are detected here.
        row = [*row, *[Mark("?", 0)] * (len(self.axes) - len(row))]
        flat = [number for mark in row for number in (ord(mark.kind), mark.number)]
        heads = gathered(
            axis, [token(call), len(new), *flat], device, operand_desc="the types of gradmesh.typed"
        )
        if len({head[0] for head in heads}) > 1:
            raise MismatchError.of(
                "the ranks are at different calls",
                op="typed",
                axis=str(axis),
                expected="the same collective, or the end of the block, on every rank",
                got=f"this rank is at {call}",
                remedy="have every rank make the same calls in the same order, and leave the block",
            )
        most = max(head[1] for head in heads)
        if most and at is not None:
            padded = new + [0] * (most - len(new))
            for rank, numbers in enumerate(gathered(axis, padded, device, operand_desc="values, as numbers")):
                self._received[at][rank].update(numbers[: heads[rank][1]])
            self._new[at] = []
        return [
            [Mark(chr(head[place]), head[place + 1]) for place in range(2, len(head), 2)] for head in heads
        ]


class Tracker:
    """The state of a block on one rank."""

    def __init__(self, axes: Sequence[Axis], *, strict: bool) -> None:
        self.axes, self.strict = axes, strict
        self.values, self.agreement = Values(), Agreement(axes)
        self.conditions: list[Condition] = []  # findings that hold if the ranks turn out to agree
        self.findings: list[Finding] = []  # those that do hold
        self.notes: list[str] = []  # what could not be followed, and what may be meant
        self.roots: list[Node] = []  # where backward passes started
        self.busy, self.open = False, True
        self._thread = threading.get_ident()
        self._calls: dict[tuple[int, ...], int] = {}
        self._looks: dict[tuple[int, int], int] = {}
        self._doubted: set[int] = set()

    @property
    def aside(self) -> bool:
        """Whether what runs now is not followed: it is this package's, or another thread's."""
        return self.busy or threading.get_ident() != self._thread

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Operators of this rank are not followed in the block."""
        busy, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = busy

    def note(self, text: str) -> None:
        """Record a note once, for what is not a finding."""
        if text not in self.notes:
            self.notes.append(text)

    def next_call(self, ranks: Sequence[int]) -> int:
        """The number of the next collective of these ranks."""
        key = tuple(ranks)
        self._calls[key] = self._calls.get(key, 0) + 1
        return self._calls[key]

    def looked_at(self, at: int, number: int) -> int:
        """Announce that this rank compares the gradient of a value; a number that ranks with as many looks share."""
        times = self._looks[at, number] = self._looks.get((at, number), 0) + 1
        looked = token("looked at", number, times)
        self.agreement.announce(at, looked)
        return looked

    def node_of(self, x: Tensor) -> Node:
        """The value of a tensor; what comes from outside is observed."""
        return self.patched(x, *self.looked_up(x))

    def looked_up(self, x: Tensor) -> tuple[Node, tuple[Patch, ...]]:
        """The value of a tensor without what was written over it through others, and that."""
        entry = self.values.find(x)
        if entry is None:
            return self.observed(x), ()
        found, patches = entry
        if not found.leaf and x.requires_grad and x.is_leaf:  # data that has become a parameter
            marks = tuple(Mark(I, one.number) if one.kind in (S, ZERO) else one for one in found.marks)
            found = dataclasses.replace(found, inputs=(), marks=marks, leaf=True)
            self.keep(x, found, patches=patches)
        return found, patches

    def assigned(self, x: Tensor, data: Tensor) -> None:
        """Give a tensor the value of another one, as `x.data = data` does: no gradient goes from one to the other."""
        node, patches = self.looked_up(data)
        leaf, marks = x.is_leaf and x.requires_grad, node.marks
        if leaf:
            marks = tuple(Mark(I, one.number) if one.kind in SAMES else one for one in marks)
        self.keep(x, dataclasses.replace(node, inputs=(), marks=marks, leaf=leaf), patches=patches)

    def patched(self, x: Tensor, node: Node, patches: tuple[Patch, ...]) -> Node:
        """The value of a tensor with what was written over it: each part that is left is a term.

        Without a pending sum among them, the bits decide.
        """
        if not patches:
            return node
        mine = Region.of(x)
        with self.paused():
            shown = visible(mine, [one.region for one in patches])
            parts: list[int] = shown.unique().tolist()
        sources = [(mine, node) if n < 0 else patches[n] for n in parts] or [(mine, node)]
        if len(sources) == 1 and sources[0] == (mine, node):
            self.keep(x, node)
            return node
        seen = self.observed(x)
        marks = tuple(
            self._joined(at, mine, sources, lambda n: self._counts_once(x, shown == parts[n]))
            if any(one.marks[at].kind in (P, UNKNOWN) for _, one in sources)
            else seen.marks[at]
            for at in range(len(self.axes))
        )
        last = sources[-1][1]
        inputs = () if node.leaf else tuple(one for _, one in sources)
        made = Node(last.op, last.site, inputs, marks, node.leaf, shape=tuple(x.shape))
        self.keep(x, made)
        return made

    def _counts_once(self, x: Tensor, part: Tensor) -> bool:
        """Whether a part of a tensor, if every rank has it, may be added to a pending sum."""
        with self.paused():
            return observable(x) and same_summed(x.detach().reshape(-1)[part.to(x.device)])

    def _joined(
        self, at: int, mine: Region, sources: Sequence[tuple[Region, Node]], once: Callable[[int], bool]
    ) -> Mark:
        """What parts make over one axis, each a term; `once` tells whether one may be added again."""
        marks = [node.marks[at] for _, node in sources]
        kinds = [mark.kind for mark in marks]
        kind, problem = rules.outcome(rules.rule("0"), {0: kinds})
        if problem == rules.COUNTS:
            kinds = [ZERO if one in SAMES and once(n) else one for n, one in enumerate(kinds)]
            kind, problem = rules.outcome(rules.rule("0"), {0: kinds})
        places = [
            (region.first - mine.first, region.shape, region.stride, mark.number or mark.kind)
            for (region, _), mark in zip(sources, marks, strict=True)
        ]
        number = token("parts", mine.shape, mine.stride, places)
        if problem and not in_backward():
            pending = next(node for _, node in sources if node.marks[at].kind == P)
            last = sources[-1][1]
            finding = Finding.at(
                problem,
                f"aten.{last.op}" if last.op else "a tensor from outside",
                self.axes[at].name,
                types_of([(node.marks[at].kind, node.shape) for _, node in sources]),
                last.site,
                f"the pending sum {began_at(pending.op or 'a tensor from outside', pending.site)}"
                if pending is not last
                else "",
            )
            present = tuple(mark.number for mark in marks if mark.kind in (P, R, I, S))
            self.expect(Condition(lambda: finding, at, present, token("finding", problem, number)))
        return Mark(kind, number if kind == P else 0)

    def observed(self, x: Tensor, like: Sequence[Kind] = (), *, times: int = 0) -> Node:
        """Inspect the bits of a tensor that was made outside of the trace; it is `like` that if all ranks have them."""
        leaf = x.is_leaf and x.requires_grad
        if observable(x):
            with self.paused():
                number, some = number_of_bits(x), bool(x.any())
            kinds = like or (I if leaf else S if some else ZERO,) * len(self.axes)
            marks = tuple(Mark(kind, number if kind in SAMES else 0) for kind in kinds)
        else:
            marks = (Mark(UNKNOWN, 0),) * len(self.axes)
        node = Node("", call_site(), (), marks, leaf, shape=tuple(x.shape))
        self.keep(x, node, times=times)
        return node

    def keep(
        self,
        x: Tensor,
        node: Node,
        *,
        base: Tensor | None = None,
        times: int = 0,
        patches: tuple[Patch, ...] = (),
    ) -> None:
        """Remember a tensor's value, and send its numbers with the next collective."""
        if times:
            self.values.wrote(x, node, times)
        else:
            self.values.keep(x, node, base=base, patches=patches)
        for at, mark in enumerate(node.marks):
            if mark.number:
                self.agreement.announce(at, mark.number)

    def declare(self, x: Tensor, axis: Axis, kind: Type) -> None:
        """Give a tensor the type that the library declares."""
        at = self.place_of(axis)
        if self.aside or at is None:
            return
        node = self.node_of(x)
        self.mark(
            x, node, at, Mark(str(kind), 0 if kind is Type.V else node.marks[at].number), declared=False
        )

    def mark(self, x: Tensor, node: Node, at: int, mark: Mark, *, declared: bool) -> None:
        """Give a tensor another mark over one axis."""
        marks = list(node.marks)
        marks[at] = mark
        made = dataclasses.replace(
            node,
            marks=tuple(marks),
            declared=node.declared or declared,
            learns=node.learns or (declared and x.requires_grad),
        )
        self.keep(x, made)

    def place_of(self, axis: Axis) -> int | None:
        """The place of an axis among those that are followed."""
        for at, mine in enumerate(self.axes):
            if mine.group is axis.group or mine.global_ranks == axis.global_ranks:
                return at
        return None

    def expect(self, condition: Condition) -> None:
        """Decide about a finding when the ranks communicate."""
        if condition.own in self._doubted:
            return
        self._doubted.add(condition.own)
        self.agreement.announce(condition.axis, condition.own)
        self.conditions.append(condition)

    def found(self, finding: Finding) -> None:
        """Something is wrong on every rank."""
        if finding in self.findings:
            return
        self.findings.append(finding)
        if self.strict:
            raise TypeMismatchError(str(finding))

    def forgive_averaged(self, at: int) -> None:
        """The program reduces gradients over an axis itself: a loss that counts many times may be intended."""
        self.conditions = [one for one in self.conditions if not (one.averaged and one.axis == at)]

    def meet(self, axis: Axis, call: str, row: Sequence[Mark], device: torch.device) -> list[list[Mark]]:
        """Exchange numbers with the other ranks of an axis, and decide about findings."""
        with self.paused():
            rows = self.agreement.meet(axis, self.place_of(axis), call, row, device)
        self.judge(at_the_end=False)
        return rows

    def judge(self, *, at_the_end: bool) -> None:
        """Decide which findings hold."""
        agreed, left = self.agreement.agreed, []
        held: list[Finding] = []
        for one in self.conditions:
            present = all(agreed(one.axis, number) for number in one.present)
            everywhere = agreed(one.axis, one.own) and not one.averaged
            if one.absent and all(agreed(one.axis, number) for number in one.absent):
                continue
            if present and (at_the_end or (everywhere and not one.absent)):
                if one.doubtful:
                    self.note(one.doubtful)
                else:
                    held.append(one.finding())
            else:
                left.append(one)
        self.conditions = [] if at_the_end else left
        for finding in held:
            self.found(finding)

    def warn(self) -> None:
        """Report the findings as warnings."""
        for finding in self.findings:
            warnings.warn_explicit(str(finding), CheckWarning, finding.file or "<unknown>", finding.line)


def together(rows: Sequence[Mark]) -> Kind:
    """The kind of a value, from the marks of all ranks.

    >>> together([Mark("S", 5), Mark("I", 5)]), together([Mark("I", 5), Mark("I", 6)])
    ('I', 'V')
    """
    kinds = {mark.kind for mark in rows}
    if UNKNOWN in kinds:
        return UNKNOWN
    alike = len({mark.number for mark in rows}) == 1
    if alike and kinds <= SAMES:
        return flavor(kinds)
    return P if alike and kinds == {P} else V
