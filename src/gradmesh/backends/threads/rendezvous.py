"""The rendezvous of thread ranks: each posts its contribution to a call, and the last one does the work for all.

Every rank posts its n-th call on a group into the group's n-th `Rendezvous`. If the contributions do not match, every
rank raises an error that lists all calls with their lines. Point-to-point messages are copied and stored until they are
received.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch

from gradmesh import _torch
from gradmesh.backends.call_check import CallCheck
from gradmesh.backends.messages import DIFFERENT_BRANCH, mismatched_message, show_call
from gradmesh.backends.threads.waiting import Waitable, World
from gradmesh.call_sites import Site, origin, seen_from
from gradmesh.errors import MismatchError, message

__all__ = ["Contribution", "Group", "Misfit", "Receive"]


class Misfit(Exception):  # noqa: N818 - converted to a MismatchError with every rank's call
    """The contributions of the ranks do not match."""


@dataclasses.dataclass(slots=True)
class Contribution:
    """One rank's contribution to a call: its name with root and reduce op, its tensors, and its call site."""

    call: str
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    site: Site
    pieces: object = None
    """The same tensors, split as the call's kernel needs them."""
    call_check: CallCheck | None = None
    """The signature that the ranks compare."""
    origin: Callable[[], str] | None = dataclasses.field(default_factory=origin)
    """Describes the forward call, if this is its backward."""
    direct: bool = False
    """Whether the call comes from gradmesh's data path, not from torch.distributed."""

    def __str__(self) -> str:
        return show_call(self.call, self.inputs, self.outputs, self.site, self.origin)


class Rendezvous(Waitable):
    """One call of a group: the contributions that have arrived, and the missing ranks."""

    def __init__(self, group: Group, number: int) -> None:
        super().__init__(group.world)
        self.group = group
        self.number = number
        self.parts: dict[int, Contribution] = {}
        self.words: list[str] | None = None
        """The descriptions of all ranks' calls after a mismatch, if all have a call check."""

    def needs(self) -> Iterable[int]:
        """The ranks that have not arrived."""
        return [rank for place, rank in enumerate(self.group.ranks) if place not in self.parts]

    def show(self, rank: int) -> str:
        """The call of a rank, with its group and line."""
        part = self.parts.get(self.group.ranks.index(rank))
        made = part or "a call on behalf of another rank (the ranks share a module or a graph)"
        return f"{made}  (call {self.number + 1} of {self.group})"

    def withdraw(self) -> bool:
        """Whether a rank is missing, so that the call can be aborted."""
        return len(self.parts) < len(self.group.ranks)

    def _in_order(self) -> list[Contribution]:
        return [self.parts[place] for place in range(len(self.group.ranks))]

    def work(self, kernel: Callable[[list[Contribution]], None]) -> None:
        """Do the work for all ranks, in the thread of the last one."""
        parts = self._in_order()
        error: BaseException | None = None
        try:
            self._compare([part.call_check for part in parts])
            if any(part.call != parts[0].call for part in parts):
                raise Misfit("the ranks made different calls")
            _torch.in_plain_mode(lambda: kernel(parts))
        except Misfit as misfit:
            self._say(parts)
            error = self._mismatch(str(misfit))
        except Exception as other:
            # A torch kernel raised, such as a bitwise op on floats: every rank must raise.
            error = other
        with self.world.lock:
            self.parts.clear()  # release the tensors
            self._complete(error)

    def _compare(self, call_checks: Sequence[CallCheck | None]) -> None:
        if len({None if call_check is None else call_check.digest for call_check in call_checks}) == 1:
            flags = [call_check.flags for call_check in call_checks if call_check is not None]
            if len(set(flags)) > 1:
                for call_check in call_checks:
                    call_check.peer_flags = flags  # type: ignore[union-attr]  # flags exist, so call checks exist
            return
        raise Misfit("the ranks made different calls")

    def _say(self, parts: Sequence[Contribution]) -> None:
        """Store the description of every rank's call, if all have a call check."""
        if all(part.call_check is not None for part in parts):
            self.words = []
            for part in parts:
                with seen_from(part.site):
                    self.words.append(part.call_check.said() if part.call_check else str(part))

    def _mismatch(self, problem: str) -> MismatchError:
        got = [f"rank {self.group.ranks[place]}  {part}" for place, part in sorted(self.parts.items())]
        return MismatchError(
            message(
                problem,
                axis=f"{self.group}, its call {self.number + 1}",
                expected="the same call with matching tensors on every rank",
                got="\n".join(got),
                remedy=DIFFERENT_BRANCH,
            )
        )


class Receive(Waitable):
    """A tensor that waits for a message from a peer, or from any rank (`source` None)."""

    def __init__(self, group: Group, place: int, source: int | None, tag: int, part: Contribution) -> None:
        super().__init__(group.world)
        self.group, self.place, self.source, self.tag, self.part = group, place, source, tag, part
        self.came_from = -1
        self.sent: Contribution | None = None
        """The sender's call, once the message has arrived."""

    def needs(self) -> Iterable[int]:
        """The sender."""
        return [] if self.source is None else [self.group.ranks[self.source]]

    def show(self, rank: int) -> str:  # noqa: ARG002 - only one rank waits for it
        """The call, with its group and line."""
        return f"{self.part}  ({self.group})"

    def withdraw(self) -> bool:
        """Remove it from the posted receives, if no message has arrived."""
        posted = self.group.posted[self.place]
        if self not in posted:
            return False
        posted.remove(self)
        return True

    def fill(self, sent: Message) -> None:
        """Copy the message, and wake the receiver."""
        (tensor,) = self.part.inputs
        error: BaseException | None = None
        if tensor.dtype != sent.tensor.dtype or tensor.numel() != sent.tensor.numel():
            error = mismatched_message(
                str(self.group),
                f"rank {self.group.ranks[sent.source]}  {sent.part}",
                f"rank {self.group.ranks[self.place]}  {self.part}",
            )
        else:
            try:
                _torch.in_plain_mode(lambda: tensor.detach().copy_(sent.tensor.reshape(tensor.shape)))
            except Exception as other:
                error = other
        self.came_from, self.sent = sent.source, sent.part
        with self.world.lock:
            self._complete(error)


@dataclasses.dataclass(slots=True, eq=False)
class Message:
    """A tensor in flight; a copy, since the sender may change the original after `send` returns."""

    source: int
    tag: int
    tensor: torch.Tensor
    part: Contribution


class Group:
    """The shared state of a process group. `place` is a group rank, `rank` a global rank."""

    @classmethod
    def of(cls, world: World, key: object, name: str, ranks: Sequence[int]) -> Group:
        """The group of this key, created by the first rank."""
        with world.lock:
            group: Group = world.shared.setdefault(key, cls(world, name, ranks))
        return group

    def __init__(self, world: World, name: str, ranks: Sequence[int]) -> None:
        self.world = world
        self.name = name
        self.purpose = ""
        self.ranks = list(ranks)
        self.calls = [0] * len(self.ranks)
        self.meetings: dict[int, Rendezvous] = {}
        self.arrived: list[list[Message]] = [[] for _ in self.ranks]
        self.posted: list[list[Receive]] = [[] for _ in self.ranks]

    def __str__(self) -> str:
        ranks = (
            ", ".join(map(str, self.ranks))
            if len(self.ranks) <= 16
            else f"{self.ranks[0]} ... {self.ranks[-1]}"
        )
        return f"group '{self.name}' of ranks {ranks}"

    def meet(
        self, place: int, part: Contribution, kernel: Callable[[list[Contribution]], None]
    ) -> Rendezvous:
        """Post a rank's contribution to its next call; the last rank does the work."""
        observer = self.world.observer
        if observer is not None:
            return observer.meet(self, place, part, kernel)
        return self.bring(place, part, kernel)

    def bring(
        self, place: int, part: Contribution, kernel: Callable[[list[Contribution]], None]
    ) -> Rendezvous:
        """`meet` without the observer."""
        with self.world.lock:
            self.world.check()
            number = self.calls[place]
            self.calls[place] += 1
            meeting = self.meetings.get(number)
            if meeting is None:
                meeting = self.meetings[number] = Rendezvous(self, number)
            meeting.parts[place] = part
            self.world.events += 1
            complete = len(meeting.parts) == len(self.ranks)
            if complete:
                del self.meetings[number]
        # After a timeout the call is done with an error, which later ranks get too.
        if complete and not meeting.done:
            meeting.work(kernel)
        return meeting

    def send(self, place: int, to: int, tag: int, part: Contribution) -> None:
        """Deliver a message to a waiting receive, or store it."""
        observer = self.world.observer
        if observer is not None:
            observer.send(self, place, to, tag, part)
        else:
            self.hand(place, to, tag, part)

    def hand(self, place: int, to: int, tag: int, part: Contribution) -> None:
        """`send` without the observer."""
        sent = Message(place, tag, _torch.in_plain_mode(part.inputs[0].clone), part)
        with self.world.lock:
            self.world.check()
            self.world.events += 1
            for receive in self.posted[to]:
                if receive.tag == tag and receive.source in (None, place):
                    self.posted[to].remove(receive)
                    break
            else:
                self.arrived[to].append(sent)
                return
        receive.fill(sent)

    def receive(self, place: int, source: int | None, tag: int, part: Contribution) -> Receive:
        """Receive the first matching message, or wait for it."""
        observer = self.world.observer
        if observer is not None:
            return observer.receive(self, place, source, tag, part)
        return self.take(place, source, tag, part)

    def take(self, place: int, source: int | None, tag: int, part: Contribution) -> Receive:
        """`receive` without the observer."""
        receive = Receive(self, place, source, tag, part)
        with self.world.lock:
            self.world.check()
            self.world.events += 1
            for sent in self.arrived[place]:
                if sent.tag == tag and source in (None, sent.source):
                    self.arrived[place].remove(sent)
                    break
            else:
                self.posted[place].append(receive)
                return receive
        receive.fill(sent)
        return receive
