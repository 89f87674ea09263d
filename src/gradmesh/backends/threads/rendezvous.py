"""Where ranks that are threads meet: each brings its part of a call, and the last one does the work for all.

Every rank posts its n-th call on a group into that group's n-th `Rendezvous`. When the parts do not fit, every
rank gets an error that shows what each of them called, and where. Messages from rank to rank are copied, and
kept until they are asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch

from gradmesh import _torch
from gradmesh.backends.call_check import CallCheck
from gradmesh.backends.threads.waiting import Waitable, World
from gradmesh.backends.words import show_call, unfit_message
from gradmesh.call_sites import Site, seen_from
from gradmesh.errors import MismatchError, message

__all__ = ["Contribution", "Group", "Misfit", "Receive"]


class Misfit(Exception):  # noqa: N818 - caught here, and turned into a MismatchError with every rank's call
    """The parts that the ranks brought do not fit together; says why."""


@dataclasses.dataclass(slots=True)
class Contribution:
    """What one rank brings to a call: its name with root and reduce op, its tensors, and where it was made."""

    call: str
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    site: Site
    pieces: object = None
    """The same tensors, cut up as the kernel of the call wants them."""
    call_check: CallCheck | None = None
    """What else the ranks have to agree in."""
    direct: bool = False
    """Whether gradmesh made the call, past torch.distributed's functions."""

    def __str__(self) -> str:
        return show_call(self.call, self.inputs, self.outputs, self.site)


class Rendezvous(Waitable):
    """One call of a group: the parts that have come, and the ranks that have not."""

    def __init__(self, group: Group, number: int) -> None:
        super().__init__(group.world)
        self.group = group
        self.number = number
        self.parts: dict[int, Contribution] = {}
        self.words: list[str] | None = None
        """What every rank claimed, in words, if all claimed something and it does not fit together."""

    def needs(self) -> Iterable[int]:
        """The ranks that have not come."""
        return [rank for place, rank in enumerate(self.group.ranks) if place not in self.parts]

    def show(self, rank: int) -> str:
        """What that rank called, on which group, and where."""
        part = self.parts.get(self.group.ranks.index(rank))
        made = part or "a call that it makes for another rank, as the ranks share a module or a graph"
        return f"{made}  (call {self.number} of {self.group})"

    def withdraw(self) -> bool:
        """Say whether a rank is missing; it will find the meeting over."""
        return len(self.parts) < len(self.group.ranks)

    def _in_order(self) -> list[Contribution]:
        return [self.parts[place] for place in range(len(self.group.ranks))]

    def work(self, kernel: Callable[[list[Contribution]], None]) -> None:
        """Do the work for all, in the thread of the rank that came last."""
        parts = self._in_order()
        error: BaseException | None = None
        try:
            self._compare([part.call_check for part in parts])
            if any(part.call != parts[0].call for part in parts):
                raise Misfit("the ranks of a group made different calls")
            _torch.in_plain_mode(lambda: kernel(parts))
        except Misfit as misfit:
            self._say(parts)
            error = self._mismatch(str(misfit))
        except Exception as other:
            # A kernel of torch refused, such as a bitwise op on floats: every rank has to hear of it.
            error = other
        with self.world.lock:
            self.parts.clear()  # the tensors belong to their ranks again
            self._complete(error)

    def _compare(self, call_checks: Sequence[CallCheck | None]) -> None:
        if len({None if call_check is None else call_check.digest for call_check in call_checks}) == 1:
            flags = [call_check.flags for call_check in call_checks if call_check is not None]
            if len(set(flags)) > 1:
                for call_check in call_checks:
                    call_check.peer_flags = flags  # type: ignore[union-attr]  # there are flags, so there are claims
            return
        raise Misfit("the ranks of a group made different calls")

    def _say(self, parts: Sequence[Contribution]) -> None:
        """Keep what every rank claims, in words, if all of them claim something."""
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
                axis=f"{self.group}, its call {self.number}",
                expected="the same call with fitting tensors on every rank",
                got="\n".join(got),
                remedy="find the branch that the ranks take differently, at the places above",
            )
        )


class Receive(Waitable):
    """A tensor that waits to be filled by the message of a peer, or of anybody (`source` None)."""

    def __init__(self, group: Group, place: int, source: int | None, tag: int, part: Contribution) -> None:
        super().__init__(group.world)
        self.group, self.place, self.source, self.tag, self.part = group, place, source, tag, part
        self.came_from = -1
        self.sent: Contribution | None = None
        """What the sender called, once the message has come."""

    def needs(self) -> Iterable[int]:
        """The sender."""
        return [] if self.source is None else [self.group.ranks[self.source]]

    def show(self, rank: int) -> str:  # noqa: ARG002 - only one rank waits for it
        """What was called, on which group, and where."""
        return f"{self.part}  ({self.group})"

    def withdraw(self) -> bool:
        """Take it from the posted ones, if no message has come."""
        posted = self.group.posted[self.place]
        if self not in posted:
            return False
        posted.remove(self)
        return True

    def fill(self, sent: Message) -> None:
        """Copy the message in, and let the receiver pass."""
        (tensor,) = self.part.inputs
        error: BaseException | None = None
        if tensor.dtype != sent.tensor.dtype or tensor.numel() != sent.tensor.numel():
            error = unfit_message(
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
    """A tensor under way; a copy, since the sender may change its own once `send` has returned."""

    source: int
    tag: int
    tensor: torch.Tensor
    part: Contribution


class Group:
    """What the ranks of one process group share. A place is a rank in the group, a rank is one in the world."""

    @classmethod
    def of(cls, world: World, key: object, name: str, ranks: Sequence[int]) -> Group:
        """The group of this key, made by the first rank that asks."""
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
        """Bring the part of one rank to its next call; the last one to come does the work."""
        observer = self.world.observer
        if observer is not None:
            return observer.meet(self, place, part, kernel)
        return self.bring(place, part, kernel)

    def bring(
        self, place: int, part: Contribution, kernel: Callable[[list[Contribution]], None]
    ) -> Rendezvous:
        """`meet`, unobserved."""
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
        # After a timeout the meeting is done, with an error, and whoever comes later gets the same error.
        if complete and not meeting.done:
            meeting.work(kernel)
        return meeting

    def send(self, place: int, to: int, tag: int, part: Contribution) -> None:
        """Hand a message to who waits for it, or leave it until it is asked for."""
        observer = self.world.observer
        if observer is not None:
            observer.send(self, place, to, tag, part)
        else:
            self.hand(place, to, tag, part)

    def hand(self, place: int, to: int, tag: int, part: Contribution) -> None:
        """`send`, unobserved."""
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
        """Take the first message that fits, or wait for it."""
        observer = self.world.observer
        if observer is not None:
            return observer.receive(self, place, source, tag, part)
        return self.take(place, source, tag, part)

    def take(self, place: int, source: int | None, tag: int, part: Contribution) -> Receive:
        """`receive`, unobserved."""
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
