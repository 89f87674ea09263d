"""The engine: each rank's events in order, and collectives when all of their ranks are there.

The library's own calls as arithmetic on the ranks' tensors: each op as it is, on a transport that autograd follows.
All motions of a transport come down to `exchange`, which here is a concatenation of slices of the other ranks' tensors.
So the gradient is what autograd makes of the forward, and nothing of the ops' own adjoints is believed.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradmesh._torch.operators import gives_view, is_view, out_arguments
from gradmesh._util.structure import tensors_in
from gradmesh.autograd.traced import Encoded, decoded_on
from gradmesh.checker.trace import (
    MOVES,
    Alias,
    Back,
    Called,
    Event,
    Hooked,
    Lost,
    Op,
    Over,
    ProgramInput,
    Ref,
    Root,
    Sent,
    Term,
    is_mean,
    refs,
)
from gradmesh.ops.meaning import meaning

_NEAR = 1e-5


class Unclear:
    """The names of backwards of which it is not known what they make of a gradient, since the last `clear`."""

    def __init__(self) -> None:
        self.names: list[str] = []


class _Through(torch.autograd.Function):
    """Results of a call, whose gradient goes back as the program's own backward passed it."""

    @staticmethod
    def forward(
        ctx: Any, back: Back, name: str, unclear: Unclear, outs: tuple[Tensor, ...], *ins: Tensor
    ) -> Any:
        ctx.back, ctx.name, ctx.unclear = back, name, unclear
        ctx.shapes = [(x.shape, x.dtype) for x in ins]
        return tuple(x.detach().clone() for x in outs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gave = _passed(ctx.back, gradients, ctx.name, ctx.unclear)
        fitting = [
            None if g is None or g.shape != shape else g.to(dtype)
            for g, (shape, dtype) in zip(gave, ctx.shapes, strict=False)
        ]
        return None, None, None, None, *fitting, *([None] * (len(ctx.shapes) - len(fitting)))


def through(back: Back, name: str, unclear: Unclear, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> Any:
    """The results of a call, connected with its operands by the backward that the program ran."""
    return _Through.apply(back, name, unclear, tuple(outs), *ins)  # type: ignore[no-untyped-call]


def hook_of(back: Back, name: str, unclear: Unclear) -> Callable[[Tensor], Tensor | None]:
    """A hook of a tensor, as the program's own hook was."""

    def hook(gradient: Tensor) -> Tensor | None:
        passed = _passed(back, (gradient,), name, unclear)[0]
        return passed if passed is not None and passed.shape == gradient.shape else None

    return hook


def scale_of(back: Back) -> float | None:
    """The number by which a backward multiplies its gradient; None where it does anything else."""
    met, gave = back.met[0], back.gave[0]
    return None if met is None or gave is None else _ratio([gave], [met])


def _passed(
    back: Back, gradients: Sequence[Tensor | None], name: str, unclear: Unclear
) -> Sequence[Tensor | None]:
    """What a backward makes of gradients, which are other ones than those it met.

    Of a multiple of what it met it makes that multiple of what it gave, whatever it does. Else it is run again, which
    says nothing where it is not linear.
    """
    times = _ratio(gradients, back.met)
    if times is not None:
        return [None if x is None else x * times for x in back.gave]
    made = _run(back, gradients)
    twice = _run(back, [None if x is None else 2 * x for x in gradients])
    if made is None or twice is None or not all(_is_twice(a, b) for a, b in zip(twice, made, strict=True)):
        unclear.names.append(name)
        return back.gave
    return made


def _is_twice(x: Tensor | None, of: Tensor | None) -> bool:
    if x is None or of is None:
        return x is of
    return torch.allclose(x, 2 * of, rtol=1e-4, atol=_NEAR * float(of.abs().max()) if of.numel() else 0.0)


def _ratio(xs: Sequence[Tensor | None], of: Sequence[Tensor | None]) -> float | None:
    pairs = [(x, y) for x, y in zip(xs, of, strict=False) if x is not None or y is not None]
    if any(x is not None and y is not None and x.shape != y.shape for x, y in pairs):
        return None
    full = [
        (torch.zeros_like(y) if x is None else x, torch.zeros_like(x) if y is None else y)  # type: ignore[arg-type]
        for x, y in pairs
    ]
    if not full:
        return 1.0
    a = torch.cat([x.detach().flatten().double() for x, _ in full])
    b = torch.cat([y.detach().flatten().double() for _, y in full])
    square = float(b @ b)
    if square == 0:
        return 1.0 if not bool(a.any()) else None
    ratio = float(a @ b) / square
    return ratio if float((a - ratio * b).norm()) <= _NEAR * float(a.norm()) else None


def _run(back: Back, gradients: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """The operators of a backward on other gradients; None where they do not run, or draw at random."""
    if not back.repeats:
        return None
    tensors: dict[int, Tensor] = {}
    for number, x, met in zip(back.ins, gradients, back.met, strict=False):
        if number is not None and met is not None:
            tensors[number] = torch.zeros_like(met) if x is None else x.detach().clone().to(met.dtype)

    try:
        with torch.no_grad():
            for each in back.ops:
                if isinstance(each, ProgramInput):
                    tensors[each.id] = each.value.clone()
                elif isinstance(each, Op):
                    tensors.update(zip(each.outs, results_of_operator(each, tensors), strict=False))
        return [None if number is None else tensors[number] for number in back.outs]
    except (RuntimeError, KeyError, IndexError, TypeError, ValueError):
        return None


def results_of_operator(event: Op, tensors: Mapping[int, Tensor]) -> list[Tensor]:
    """What an operator makes of these tensors, by their numbers."""

    def valued(value: Any) -> Any:
        if isinstance(value, Ref):
            return tensors[value.id]
        if isinstance(value, (list, tuple)):
            return type(value)(valued(part) for part in value)
        if isinstance(value, dict):
            return {key: valued(part) for key, part in value.items()}
        return value

    operator, args, kwargs = named_operator(event.name), valued(event.args), valued(event.kwargs)
    outs = [kwargs.pop(each) for each in out_arguments(operator)]
    if not outs:
        return list(tensors_in(operator(*args, **kwargs)))
    # Autograd refuses out=, but not a copy.
    made = list(tensors_in(operator.overloadpacket(*args, **kwargs)))
    return [out.copy_(y) for out, y in zip(outs, made, strict=True)]


def named_operator(name: str) -> Any:
    """An operator by its name, as "aten.mul.Tensor"."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def results_of(
    calls: Sequence[Sent], ins: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[torch.Size]]
) -> list[list[Tensor]] | None:
    """What each rank of a group gets, of what each handed in; None where that is not known.

    `shapes` are those of each rank's results, where they are written.
    """
    kind, first = calls[0].kind, calls[0]
    if first.verb is not None:
        verbs = [call.verb for call in calls if call.verb is not None]
        ops = [decoded_on(Encoded(v.words, v.numbers, v.tensors, ""), v.rank, v.size, None) for v in verbs]
        with torch.enable_grad():
            return [[y] for y in meaning(ops, [each[0] for each in ins])]
    if kind == "all_reduce":
        sums = [combined([each[at] for each in ins], first.reduce) for at in range(len(ins[0]))]
        return [list(sums) for _ in calls]
    if kind == "broadcast":
        return [list(ins[first.root]) for _ in calls]
    if kind == "reduce":
        sums = [combined([each[at] for each in ins], first.reduce) for at in range(len(ins[0]))]
        return [sums if at == first.root else list(ins[at]) for at in range(len(calls))]
    if kind == "all_gather":
        return [_shared([each[0] for each in ins], wanted) for wanted in shapes]
    if kind == "all_gather_each":
        parts = [_shared([each[at] for each in ins], []) for at in range(len(ins[0]))]
        return [[part[0] for part in parts] for _ in calls] if len(shapes[0]) in (0, len(parts)) else None
    if kind == "gather":
        return [[each[0] for each in ins] if at == first.root else [] for at in range(len(calls))]
    if kind == "scatter":
        return [[ins[first.root][at]] for at in range(len(calls))]
    if kind in ("reduce_scatter", "reduce_scatter_each"):
        return _reduced_parts(calls, ins, kind)
    if kind == "all_to_all":
        return [[each[at] for each in ins] for at in range(len(calls))]
    if kind == "all_to_all_single":
        return _exchanged(calls, ins)
    return None


def combined(parts: Sequence[Tensor], reduce: str) -> Tensor:
    """The ranks' tensors made one."""
    stack = torch.stack(list(parts))
    if reduce in ("sum", ""):
        return stack.sum(0)
    if reduce in ("avg", "mean"):
        return stack.mean(0)
    if reduce in ("max", "min"):
        return stack.amax(0) if reduce == "max" else stack.amin(0)
    return stack.prod(0)


def _shared(parts: Sequence[Tensor], wanted: Sequence[torch.Size]) -> list[Tensor]:
    """All ranks' parts: one by one where so many are written, else along the first dim."""
    if len(wanted) == len(parts) and (len(parts) > 1 or wanted[0] == parts[0].shape):
        return [part.reshape(shape) for part, shape in zip(parts, wanted, strict=True)]
    whole = torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts])
    return [whole.reshape(wanted[0]) if wanted else whole]


def _reduced_parts(calls: Sequence[Sent], ins: Sequence[Sequence[Tensor]], kind: str) -> list[list[Tensor]]:
    ranks, reduce = len(calls), calls[0].reduce
    if kind == "reduce_scatter" and len(ins[0]) == ranks and ranks > 1:
        return [[combined([each[at] for each in ins], reduce)] for at in range(ranks)]
    sums = [combined([each[at] for each in ins], reduce) for at in range(len(ins[0]))]
    return [[part.chunk(ranks)[at] for part in sums] for at in range(ranks)]


def _exchanged(calls: Sequence[Sent], ins: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    ranks, pieces = len(calls), []
    for call, (x, *_) in zip(calls, ins, strict=True):
        given = (call.splits or ([], []))[1] or [x.shape[0] // ranks] * ranks
        pieces.append(x.split(given))
    return [[torch.cat([pieces[source][at] for source in range(ranks)])] for at in range(ranks)]


_PACKS = {*MOVES, "cat", "stack"}
"""What a program makes a message with."""
_SCALED = {"div", "div_", "mul", "mul_"}
_SUMS = {"add", "add_", "sub", "sub_"}
_PARTS = {"cat", "stack", "copy_", "index_put_", "select_scatter", "slice_scatter"}


def put_back(events: Sequence[Event]) -> frozenset[int]:
    """The results of `detach` that stand for the tensor itself.

    A program gathers, or sums, a detached copy of a tensor and puts the tensor in the place of its own part:
    `parts[rank] = x` before `cat`, or `x + (total - x.detach())`. The result has the value of the collective of the
    tensor, and that is what a gradient is compared with.
    """
    source: dict[int, int] = {}
    detached: dict[int, list[int]] = {}
    made: dict[int, set[int]] = {}
    found: set[int] = set()
    for event in events:
        if isinstance(event, Alias):
            if event.of in source:
                source[event.id] = source[event.of]
            made[event.id] = set(made.get(event.of, ()))
        elif isinstance(event, Sent):
            if event.followed and event.verb is None and event.kind.startswith(("all_gather", "all_reduce")):
                for number in event.outs:
                    made[number] = {source[n] for n in event.ins if n in source}
        elif isinstance(event, Op) and event.call is None:
            name, taken = event.base, refs(event)
            if name == "detach" and taken[0] not in source:
                detached.setdefault(taken[0], []).extend(event.outs)
                source.update(dict.fromkeys(event.outs, taken[0]))
                continue
            origins = {source[n] for n in taken if n in source and not made.get(n)}
            of = set[int]().union(*(made.get(n, set()) for n in taken))
            plain = [n for n in taken if not made.get(n) and n not in source]
            if name in _PARTS or name in _SUMS:
                found |= of.intersection(plain)
            if of and (
                name in MOVES or name in _SCALED or (name in _SUMS and origins <= of) or name in _PARTS
            ):
                for number in event.outs:
                    made[number] = made.get(number, set()) | of
            elif name in MOVES and len(origins) == 1 and taken:
                source.update(dict.fromkeys(event.outs, next(iter(origins))))
    return frozenset(number for x in found for number in detached.get(x, ()))


def overwritten_by_calls(events: Sequence[Event]) -> Mapping[int, list[tuple[int, int]]]:
    """The tensors that Functions take and overwrite: numbers of the call and the tensor, by the event before that."""
    begins: dict[int, int] = {}
    made: dict[int, tuple[int, int | None]] = {}
    root: dict[int, int] = {}
    found: dict[tuple[int, int], int] = {}
    for at, event in enumerate(events):
        if isinstance(event, Alias):
            root[event.id] = root.get(event.of, event.of)
        elif isinstance(event, ProgramInput):
            made[event.id] = at, None
        elif isinstance(event, Op):
            taken, call = refs(event), event.call
            if call is not None and call not in begins:
                begins[call] = at
                while begins[call] and isinstance(events[begins[call] - 1], (Alias, ProgramInput)):
                    begins[call] -= 1
            for number in event.outs:
                if number not in taken:
                    made[number] = at, call
                    if gives_view(named_operator(event.name)):
                        root[number] = root.get(taken[0], taken[0])
                elif call is not None:
                    whole = root.get(number, number)
                    since, by = made.get(whole, (-1, None))
                    if by != call:
                        found[call, whole] = max(begins[call], since + 1)
    by_event: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    for key, at in found.items():
        by_event[at].append(key)
    return by_event


class UnfaithfulError(Exception):
    """What is run again is not what the program did: nothing is said of its gradients then."""


class UnpairedError(UnfaithfulError):
    """The ranks' calls do not pair up within the step: those of later steps do not either."""


@dataclass
class Rank:
    """One rank, run again."""

    tensors: dict[int, Tensor] = field(default_factory=dict)  # by number, as they are now
    # what Functions took and have overwritten, by the numbers of the call and of the tensor
    given: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    # parameters by number, which gradients are asked for
    leaves: dict[int, Tensor] = field(default_factory=dict)
    # of what the program detached, what it was before
    attached: dict[int, Tensor] = field(default_factory=dict)
    roots: list[tuple[Root, Tensor]] = field(default_factory=list)  # where backwards began
    lost: list[Lost] = field(default_factory=list)  # what the recorder could not follow
    # tensors of which it is not known where they came from, which counts where a loss depends on them
    missing: list[tuple[Lost, Tensor]] = field(default_factory=list)
    # tensors that the program declares terms of a sum over some ranks, though all of these have its value, and what is
    # made of them
    declared: dict[int, tuple[int, ...]] = field(default_factory=dict)
    terms: set[int] = field(default_factory=set)  # those ranks, of a loss that is such a term
    # how far the last bits of its parameters are changed, in units of a few of these; 0 if not
    shaken: float = 0.0
    size: int = 1  # the number of all ranks
    # the names of Functions that send something on some rank, in forward or in backward
    senders: frozenset[str] = frozenset()
    # backwards of which it is not known what they make of a gradient
    unclear: Unclear = field(default_factory=Unclear)
    hooks: list[Hooked] = field(default_factory=list)  # of tensors, in order
    continues: bool = False  # whether a backward of this rank begins with a gradient that another rank sent
    returned: frozenset[int] = frozenset()  # results of `detach` that stand for the tensor itself

    def run(self, events: Sequence[Event]) -> Generator[Sent, None, None]:
        """Do what the events say; stops at each collective, until its results are there."""
        self.returned = put_back(events)
        self.continues = any(isinstance(event, Root) and event.passed_on for event in events)
        overwritten = overwritten_by_calls(events)
        for at, event in enumerate(events):
            for call, number in overwritten.get(at, ()):
                if (x := self.tensors.get(number)) is not None:
                    self.given[call, number], self.tensors[number] = x, x.clone()
            if isinstance(event, ProgramInput):
                value = event.value
                if event.lost and (value.is_floating_point() or value.is_complex()):
                    missing = value.clone().requires_grad_()
                    self.missing.append((Lost(event.lost, event.site), missing))
                    self.tensors[event.id] = missing.clone()
                elif event.leaf and (value.is_floating_point() or value.is_complex()):
                    value = _shaken(value, self.shaken) if self.shaken else value.clone()
                    leaf = self.leaves[event.id] = value.requires_grad_()
                    self.tensors[event.id] = leaf.clone()
                else:
                    self.tensors[event.id] = value.clone()
            elif isinstance(event, Alias):
                self.tensors[event.id] = event.view(self.tensors[event.of])
            elif isinstance(event, Op):
                self._operate(event)
            elif isinstance(event, Sent):
                yield event
            elif isinstance(event, Root):
                # As it is now: programs sum the loss over ranks in place, to print it, after its backward.
                self.roots.append((event, self.tensors[event.id].clone()))
                self.terms.update(self.declared.get(event.id, ()))
            elif isinstance(event, Term):
                self.declared[event.id] = event.group
            elif isinstance(event, Lost):
                self.lost.append(event)
            elif isinstance(event, Over):
                self._over(event.call, unseen=event.unseen)
            elif isinstance(event, Hooked):
                self.hooks.append(event)
        self._hook()

    def operand(self, call: Called, number: int) -> Tensor | None:
        """What a call of a Function took."""
        x = self.given.get((call.number, number))
        return self.tensors.get(number) if x is None else x

    def _over(self, call: Called, *, unseen: bool) -> None:
        """The end of a call: the gradient goes through it as its own backward passed it, where nothing is sent."""
        own = call.back is not None and call.name not in self.senders
        if unseen and not own:
            self.lost.append(Lost(f"what {call.name} computes is not seen", call.site))
        numbers = [number for number in call.outs if number is not None]
        outs = [self.tensors[number] for number in numbers]
        there = [None if number is None else self.operand(call, number) for number in call.ins]
        gives = any(x is not None and x.requires_grad for x in there)
        # What gradients do not pass through is as it is: integers, and results that are marked so.
        if call.back is None or not own or not gives or len(numbers) != len(call.outs):
            return
        if not all(x.is_floating_point() or x.is_complex() for x in outs):
            return
        ins = [x if x is not None else torch.zeros(()) for x in there]
        made = through(call.back, call.name, self.unclear, outs, ins)
        self.tensors.update(zip(numbers, made, strict=True))

    def _hook(self) -> None:
        """Hooks of the program change gradients as they did.

        But for an average over the ranks: where the hooks of all parameters divide by their number or call a
        collective, what they do is compared with the true gradient, and is not part of it.
        """
        of_leaves = [hook for hook in self.hooks if hook.id in self.leaves]
        sending = {hook.id for hook in of_leaves if hook.back is None}
        scales = {hook.id: scale_of(hook.back) for hook in of_leaves if hook.back is not None}
        shares = {number for number, x in scales.items() if x is not None and is_mean(x, self.size)}
        averages = len(shares | sending) == len(self.leaves) > 0
        done: set[tuple[int, int]] = set()
        for hook in self.hooks:
            x = self.tensors.get(hook.id)
            if hook.back is None or x is None or not x.requires_grad or (hook.id, hook.site) in done:
                continue
            if averages and hook.id in scales:
                continue
            done.add((hook.id, hook.site))  # a hook runs in each backward, of which there may be several
            x.register_hook(hook_of(hook.back, "a hook", self.unclear))

    def _operate(self, event: Op) -> None:
        if event.name == "aten.detach.default":
            x = self.tensors[event.args[0].id]
            through = event.call is not None or event.outs[0] in self.returned
            self.tensors[event.outs[0]] = x.view_as(x) if through else x.detach()
            self.attached[event.outs[0]] = self.attached.get(event.args[0].id, x)
            return
        if self.declared:
            known = [self.declared[number] for number in refs(event) if number in self.declared]
            self.declared.update({number: known[0] for number in event.outs if known})
        self.tensors.update(zip(event.outs, results_of_operator(event, self.tensors), strict=True))
        if self.continues and event.base in _PACKS and self.attached.keys() & set(refs(event)):
            made = results_of_operator(event, {**self.tensors, **self.attached})
            self.attached.update(zip(event.outs, made, strict=True))

    def taken(self, call: Sent) -> list[Tensor]:
        """What a collective takes.

        A message of a rank whose backward goes on with what comes back takes it as it was before it was detached; of
        another rank it is data.
        """
        if call.kind == "send" and self.continues:
            return [self.attached.get(number, self.tensors[number]) for number in call.ins]
        return [self.tensors[number] for number in call.ins]

    def write(self, call: Sent, values: Sequence[Tensor]) -> None:
        """Put a collective's results where they belong."""
        if len(values) != len(call.outs):
            raise UnfaithfulError(f"the results of {call.kind} do not fit")
        for number, value in zip(call.outs, values, strict=True):
            there = self.tensors.get(number)
            if there is None:
                self.tensors[number] = value.clone()
                continue
            value = value.reshape(there.shape).to(there.dtype)
            same = self._same_part(number, there)
            if same and call.kind == "recv":  # a buffer is used again, and autograd has saved what was in it
                self.tensors.update(dict.fromkeys(same, value.clone()))
            elif is_view(there) or self._is_shared(number, there):
                there.copy_(value)
            else:  # what autograd has saved of it stays as it was
                self.tensors[number] = value.clone()

    def _same_part(self, number: int, x: Tensor) -> list[int]:
        """The numbers of what is in a tensor's memory, where all of that is the same part of it; else none."""
        store, part = x.untyped_storage().data_ptr(), (x.shape, x.stride(), x.storage_offset())
        there = {at: y for at, y in self.tensors.items() if y.untyped_storage().data_ptr() == store}
        same = all((y.shape, y.stride(), y.storage_offset()) == part for y in there.values())
        return list(there) if same and number in there else []

    def _is_shared(self, number: int, x: Tensor) -> bool:
        store = x.untyped_storage().data_ptr()
        return any(
            other.untyped_storage().data_ptr() == store
            for at, other in self.tensors.items()
            if at != number and other is not x
        )


@dataclass
class Again:
    """All ranks, run again."""

    ranks: list[Rank]  # one by one
    # for each collective that was made by all of its ranks: its call on each of them
    groups: list[dict[int, Sent]] = field(default_factory=list)
    # who sent which to whom, and how that rank took it
    messages: list[tuple[int, Sent, int, Sent]] = field(default_factory=list)
    calls: int = 0  # how many collectives gradients pass through

    @property
    def unclear(self) -> list[str]:
        """Functions and hooks of which it is not known what they make of gradients that have come to them."""
        return [name for rank in self.ranks for name in rank.unclear.names]


def _shaken(x: Tensor, by: float) -> Tensor:
    """The same with other last bits, on every rank that has it in the same way."""
    size = x.abs() + x.abs().max() if x.numel() else x.abs()
    way = (
        torch.arange(1, x.numel() + 1, dtype=torch.float64, device=x.device)
        .mul(12.9898)
        .sin()
        .reshape(x.shape)
    )
    return x + (4 * by * torch.finfo(x.dtype).eps * size * way).to(x.dtype)


def run_again(parts: Sequence[Sequence[Event]], *, shaken: float = 0.0, kind: type[Rank] = Rank) -> Again:
    """Run all ranks' events again, in one process; raises UnfaithfulError where it does not come out as it did.

    The last bits of all parameters may be `shaken`, by so many units of a few of these; `kind` is what runs a rank.
    """
    calls = [event.call for part in parts for event in part if isinstance(event, Over)]
    senders = frozenset(call.name for call in calls if call.sends or call.sends_back)
    again = Again([kind(shaken=shaken, size=len(parts), senders=senders) for _ in parts])
    running = [rank.run(events) for rank, events in zip(again.ranks, parts, strict=True)]
    waiting: dict[int, Sent] = {}
    letters: dict[tuple[int, int, int], collections.deque[tuple[Sent, list[Tensor]]]] = (
        collections.defaultdict(collections.deque)
    )
    todo = collections.deque(range(len(parts)))
    with torch.enable_grad():
        while todo:
            rank = todo.popleft()
            try:
                call = next(running[rank])
            except StopIteration:
                continue
            except (RuntimeError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                raise UnfaithfulError(f"rank {rank}: {type(error).__name__}: {error}") from error
            waiting[rank] = call
            _deliver(again, waiting, letters, todo)
    if waiting:
        stuck = ", ".join(f"{call.kind} on rank {rank}" for rank, call in sorted(waiting.items()))
        raise UnpairedError(f"not all ranks make the same calls: {stuck}")
    for at, each in enumerate(again.ranks):
        for root, found in each.roots:
            if not torch.allclose(found.detach(), root.value, rtol=1e-3, atol=1e-5, equal_nan=True):
                raise UnfaithfulError(f"the loss of rank {at} does not come out again")
    return again


def _deliver(again: Again, waiting: dict[int, Sent], letters: Any, todo: Any) -> None:
    """Make every call whose ranks are all there."""
    moved = True
    while moved:
        moved = False
        for rank, call in list(waiting.items()):
            if call.kind in ("send", "recv"):
                moved = _message(again, rank, call, waiting, letters, todo) or moved
                continue
            there = [waiting.get(other) for other in call.group]
            if any(other is None or _key(other) != _key(call) for other in there):
                continue
            calls = [other for other in there if other is not None]
            for other in call.group:
                del waiting[other]
                todo.append(other)
            _together(again, call.group, calls)
            moved = True
            break


def _key(call: Sent) -> tuple[str, tuple[int, ...], str]:
    return call.kind, call.group, call.name


def _message(again: Again, rank: int, call: Sent, waiting: Any, letters: Any, todo: Any) -> bool:
    peer = call.group[call.root] if 0 <= call.root < len(call.group) else -1
    if call.kind == "send":
        values = again.ranks[rank].taken(call) if call.followed else []
        letters[rank, peer, call.tag].append((call, values))
        for number in call.outs:  # an empty tensor is left
            again.ranks[rank].tensors[number] = values[0].new_empty(0)
    else:
        box = letters[peer, rank, call.tag]
        if not box:
            return False
        sent, values = box.popleft()
        if call.followed and values:
            again.messages.append((peer, sent, rank, call))
            again.ranks[rank].write(call, values)
            again.calls += 1
    del waiting[rank]
    todo.append(rank)
    return True


def _together(again: Again, group: Sequence[int], calls: Sequence[Sent]) -> None:
    again.groups.append(dict(zip(group, calls, strict=True)))
    if not all(call.followed for call in calls):
        if any(call.followed and call.phase == "forward" for call in calls):
            for rank, call in zip(group, calls, strict=True):
                again.ranks[rank].lost.append(Lost(f"{call.kind} is followed on some ranks alone", call.site))
        return
    ins = [again.ranks[rank].taken(call) for rank, call in zip(group, calls, strict=True)]
    shapes = [
        [
            again.ranks[rank].tensors[number].shape
            for number in call.outs
            if number in again.ranks[rank].tensors
        ]
        for rank, call in zip(group, calls, strict=True)
    ]
    results = results_of(calls, ins, shapes)
    if results is None:
        raise UnfaithfulError(f"{calls[0].kind} cannot be run again")
    again.calls += any(x.requires_grad for each in ins for x in each)
    for rank, call, values in zip(group, calls, results, strict=True):
        again.ranks[rank].write(call, values)
