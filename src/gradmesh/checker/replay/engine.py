"""The engine: each rank's events in order, and collectives when all of their ranks are there."""

from __future__ import annotations

import collections
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradmesh.checker.recording.tape import (
    Alias,
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
    refs,
)
from gradmesh.checker.replay.backs import Unclear, hook_of, named_operator, scale_of, through
from gradmesh.checker.replay.collectives import results_of
from gradmesh.checker.replay.returned import put_back

__all__ = ["Again", "Rank", "UnfaithfulError", "run_again"]


class UnfaithfulError(Exception):
    """What is run again is not what the program did: nothing is said of its gradients then."""


@dataclass
class Rank:
    """One rank, run again.

    Attributes:
        tensors: by number, as they are now.
        leaves: parameters by number, which gradients are asked for.
        attached: of what the program detached, what it was before.
        roots: where backwards began.
        lost: what the recorder could not follow.
        declared: tensors that the program declares terms of a sum over some ranks, though all of these have its value,
            and what is made of them.
        terms: those ranks, of a loss that is such a term.
        shaken: whether the last bits of its parameters are changed.
        size: the number of all ranks.
        senders: the names of Functions that send something on some rank, in forward or in backward.
        unclear: backwards of which it is not known what they make of a gradient.
        hooks: of tensors, in order.
        returned: results of `detach` that stand for the tensor itself.
        continues: whether a backward of this rank begins with a gradient that another rank sent.
        missing: tensors of which it is not known where they came from, which counts where a loss depends on them.
    """

    tensors: dict[int, Tensor] = field(default_factory=dict)
    leaves: dict[int, Tensor] = field(default_factory=dict)
    attached: dict[int, Tensor] = field(default_factory=dict)
    roots: list[tuple[Root, Tensor]] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    missing: list[tuple[Lost, Tensor]] = field(default_factory=list)
    declared: dict[int, tuple[int, ...]] = field(default_factory=dict)
    terms: set[int] = field(default_factory=set)
    shaken: bool = False
    size: int = 1
    senders: frozenset[str] = frozenset()
    unclear: Unclear = field(default_factory=Unclear)
    hooks: list[Hooked] = field(default_factory=list)
    continues: bool = False
    returned: frozenset[int] = frozenset()

    def run(self, events: Sequence[Event]) -> Generator[Sent, None, None]:
        """Do what the events say; stops at each collective, until its results are there."""
        self.returned = put_back(events)
        self.continues = any(isinstance(event, Root) and event.passed_on for event in events)
        for event in events:
            if isinstance(event, ProgramInput):
                value = event.value
                if event.lost and (value.is_floating_point() or value.is_complex()):
                    missing = value.clone().requires_grad_()
                    self.missing.append((Lost(event.lost, event.site), missing))
                    self.tensors[event.id] = missing.clone()
                elif event.leaf and (value.is_floating_point() or value.is_complex()):
                    value = _shaken(value) if self.shaken else value.clone()
                    leaf = self.leaves[event.id] = value.requires_grad_()
                    self.tensors[event.id] = leaf.clone()
                else:
                    self.tensors[event.id] = value.clone()
            elif isinstance(event, Alias):
                of = self.tensors[event.of]
                self.tensors[event.id] = of.as_strided(event.shape, event.stride, event.offset)
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

    def _over(self, call: Called, *, unseen: bool) -> None:
        """The end of a call: the gradient goes through it as its own backward passed it, where nothing is sent."""
        own = call.back is not None and call.name not in self.senders
        if unseen and not own:
            self.lost.append(Lost(f"what {call.name} computes is not seen", call.site))
        numbers = [number for number in call.outs if number is not None]
        outs = [self.tensors[number] for number in numbers]
        there = [None if number is None else self.tensors.get(number) for number in call.ins]
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
        shares = {number for number, x in scales.items() if x is not None and _counts_ranks(x, self.size)}
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
        result = named_operator(event.name)(*self._valued(event.args), **self._valued(event.kwargs))
        made = [result] if isinstance(result, Tensor) else _flat(result)
        for number, x in zip(event.outs, made, strict=True):
            self.tensors[number] = x

    def _valued(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.tensors[value.id]
        if isinstance(value, (list, tuple)):
            return type(value)(self._valued(part) for part in value)
        if isinstance(value, dict):
            return {key: self._valued(part) for key, part in value.items()}
        return value

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
            if there._is_view() or self._is_shared(number, there):
                there.copy_(value)
            else:  # what autograd has saved of it stays as it was
                self.tensors[number] = value.clone()

    def _is_shared(self, number: int, x: Tensor) -> bool:
        store = x.untyped_storage().data_ptr()
        return any(
            other.untyped_storage().data_ptr() == store
            for at, other in self.tensors.items()
            if at != number and other is not x
        )


@dataclass
class Again:
    """All ranks, run again.

    Attributes:
        ranks: one by one.
        groups: for each collective that was made by all of its ranks: its call on each of them.
        messages: who sent which to whom, and how that rank took it.
        calls: how many collectives gradients pass through.
    """

    ranks: list[Rank]
    groups: list[dict[int, Sent]] = field(default_factory=list)
    messages: list[tuple[int, Sent, int, Sent]] = field(default_factory=list)
    calls: int = 0

    @property
    def unclear(self) -> list[str]:
        """Functions and hooks of which it is not known what they make of gradients that have come to them."""
        return [name for rank in self.ranks for name in rank.unclear.names]


def _counts_ranks(x: float, ranks: int) -> bool:
    return any(abs(x * n - 1) < 1e-6 or abs(x / n - 1) < 1e-6 for n in range(2, ranks + 1))


def _shaken(x: Tensor) -> Tensor:
    """The same with other last bits, on every rank that has it in the same way."""
    size = x.abs() + x.abs().max() if x.numel() else x.abs()
    way = torch.arange(x.numel(), dtype=torch.float64).mul(12.9898).sin().reshape(x.shape)
    return x + (4 * torch.finfo(x.dtype).eps * size * way).to(x.dtype)


def run_again(parts: Sequence[Sequence[Event]], *, shaken: bool = False) -> Again:
    """Run all ranks' events again, in one process.

    Args:
        parts: of each rank.
        shaken: change the last bits of all parameters.

    Raises:
        UnfaithfulError: something is missing, or does not come out as it did.
    """
    calls = [event.call for part in parts for event in part if isinstance(event, Over)]
    senders = frozenset(call.name for call in calls if call.sends or call.sends_back)
    again = Again([Rank(shaken=shaken, size=len(parts), senders=senders) for _ in parts])
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
        raise UnfaithfulError(f"not all ranks make the same calls: {stuck}")
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
    again.calls += 1
    for rank, call, values in zip(group, calls, results, strict=True):
        again.ranks[rank].write(call, values)


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [x for part in value for x in _flat(part)]
    return []
