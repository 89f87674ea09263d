"""The state of one `typed` block on one rank: what is known, what was said, what is still to be judged."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradmesh._torch import in_backward
from gradmesh.axis import Axis
from gradmesh.call_sites import call_site
from gradmesh.errors import CheckWarning, TypeMismatchError
from gradmesh.type_inference import rules
from gradmesh.type_inference.agreement import Agreement
from gradmesh.type_inference.digest import number_of_bits, observable, same_summed, token
from gradmesh.type_inference.findings import Condition, Finding, began_at, types_of
from gradmesh.type_inference.kinds import SAMES, UNKNOWN, ZERO, I, Kind, P, R, S, V, flavor
from gradmesh.type_inference.tape import Mark, Node, Patch, Region, Tape, visible
from gradmesh.types import Type

__all__ = ["Tracker", "together"]


class Tracker:
    """What a rank knows.

    Args:
        axes: the axes that are followed.
        strict: whether the first finding is raised.

    Attributes:
        tape: the tensors' values.
        agreement: what the ranks have said.
        conditions: findings that hold if the ranks turn out to agree.
        findings: those that do hold.
        notes: what could not be followed, and what may be meant.
        roots: where backward passes began.
        busy: whether what is run now is not followed.
        open: whether the block is.
    """

    def __init__(self, axes: Sequence[Axis], *, strict: bool) -> None:
        self.axes, self.strict = axes, strict
        self.tape, self.agreement = Tape(), Agreement(axes)
        self.conditions: list[Condition] = []
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.roots: list[Node] = []
        self.busy, self.open = False, True
        self._thread = threading.get_ident()
        self._calls: dict[tuple[int, ...], int] = {}
        self._looks: dict[tuple[int, int], int] = {}
        self._doubted: set[int] = set()

    @property
    def aside(self) -> bool:
        """Whether what runs now is none of the program's own: this file's, or another thread's."""
        return self.busy or threading.get_ident() != self._thread

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
        """Tell the other ranks of an axis that this one compares the gradient of a value, and how often it has.

        Args:
            at: the axis.
            number: the value's.

        Returns:
            A number that every rank has said that has compared it as often.
        """
        times = self._looks[at, number] = self._looks.get((at, number), 0) + 1
        looked = token("looked at", number, times)
        self.agreement.say(at, looked)
        return looked

    def node_of(self, x: Tensor) -> Node:
        """The value of a tensor; what comes from outside is observed."""
        return self.patched(x, *self.looked_up(x))

    def looked_up(self, x: Tensor) -> tuple[Node, tuple[Patch, ...]]:
        """The value of a tensor without what was written over it through others, and that."""
        entry = self.tape.find(x)
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

        Where none of them is a pending sum, the bits decide.
        """
        if not patches:
            return node
        mine, busy, self.busy = Region.of(x), self.busy, True
        try:
            shown = visible(mine, [one.region for one in patches])
            parts: list[int] = shown.unique().tolist()
        finally:
            self.busy = busy
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
        busy, self.busy = self.busy, True
        try:
            return observable(x) and same_summed(x.detach().reshape(-1)[part.to(x.device)])
        finally:
            self.busy = busy

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
        """Inspect the bits of a tensor that was made outside of the trace.

        Args:
            x: the tensor.
            like: for each axis, what it is if all ranks turn out to have these bits; V and ? are so anyway.
            times: how often its memory is written now.
        """
        leaf = x.is_leaf and x.requires_grad
        if observable(x):
            busy, self.busy = self.busy, True
            try:
                number, some = number_of_bits(x), bool(x.any())
            finally:
                self.busy = busy
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
        """Remember a tensor's value, and update the others when they are met.

        Args:
            x: the tensor.
            node: its value.
            base: what it is a view of.
            times: how often the operator that made the value writes to this memory; 0: it wrote nothing.
            patches: what has been written over that value.
        """
        if times:
            self.tape.wrote(x, node, times)
        else:
            self.tape.keep(x, node, base=base, patches=patches)
        for at, mark in enumerate(node.marks):
            if mark.number:
                self.agreement.say(at, mark.number)

    def declare(self, x: Tensor, axis: Axis, kind: Type) -> None:
        """Take a tensor for what the library itself says it is."""
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
        made = Node(
            node.op,
            node.site,
            node.inputs,
            tuple(marks),
            node.leaf,
            node.collective,
            declared=node.declared or declared,
            learns=node.learns or (declared and x.requires_grad),
            shape=node.shape,
        )
        self.keep(x, made)

    def place_of(self, axis: Axis) -> int | None:
        """The place of an axis among those that are followed."""
        for at, mine in enumerate(self.axes):
            if mine.group is axis.group or mine.global_ranks == axis.global_ranks:
                return at
        return None

    def expect(self, condition: Condition) -> None:
        """Judge something when the ranks meet."""
        if condition.own in self._doubted:
            return
        self._doubted.add(condition.own)
        self.agreement.say(condition.axis, condition.own)
        self.conditions.append(condition)

    def found(self, finding: Finding) -> None:
        """Something is wrong on every rank.

        Raises:
            TypeMismatchError: in a strict block.
        """
        if finding in self.findings:
            return
        self.findings.append(finding)
        if self.strict:
            raise TypeMismatchError(str(finding))

    def forgive_averaged(self, at: int) -> None:
        """Gradients are summed or averaged by hand over an axis: a loss that counts many times may be meant."""
        self.conditions = [one for one in self.conditions if not (one.averaged and one.axis == at)]

    def meet(self, axis: Axis, call: str, row: Sequence[Mark], device: torch.device) -> list[list[Mark]]:
        """Meet the other ranks of an axis, and judge what can be judged."""
        busy, self.busy = self.busy, True
        try:
            rows = self.agreement.meet(axis, self.place_of(axis), call, row, device)
        finally:
            self.busy = busy
        self.judge(at_the_end=False)
        return rows

    def judge(self, *, at_the_end: bool) -> None:
        """See which findings hold."""
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
                    held.append(one.tell())
            else:
                left.append(one)
        self.conditions = [] if at_the_end else left
        for finding in held:
            self.found(finding)

    def warn(self) -> None:
        """Tell what was found as warnings."""
        for finding in self.findings:
            warnings.warn_explicit(str(finding), CheckWarning, finding.file or "<unknown>", finding.line)


def together(rows: Sequence[Mark]) -> Kind:
    """What ranks have, who show each other their marks.

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
