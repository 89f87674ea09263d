"""Creates events from calls: their bytes, axis, phase, call site and origin."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from gradmesh._torch import in_backward
from gradmesh.backends.threads.rendezvous import Contribution, Group
from gradmesh.call_sites import Site
from gradmesh.transport.call_checks import TANGENT, CallRecord, OpCallCheck
from gradmesh.verify.simulator.counting import op_of, payload_of, sent_by
from gradmesh.verify.simulator.events import Event, Phase

__all__ = ["Notes", "show"]


class Notes:
    """The events of a run.

    Args:
        mesh: the sizes of the axes by name, the slowest first; groups are named by the axes that they extend along.
    """

    def __init__(self, mesh: Mapping[str, int]) -> None:
        self.events: list[Event] = []
        self._lock = threading.Lock()
        self._mesh = dict(mesh)
        self._axes: dict[Group, str] = {}
        self._made_by: dict[int, tuple[CallRecord, Event]] = {}
        self._last: dict[tuple[Group, int], tuple[OpCallCheck, Site]] = {}

    def note(self, group: Group, place: int, part: Contribution, now: float) -> Event:
        """Create the event of a call."""
        with self._lock:
            return self._note(group, place, part, now)

    def _note(self, group: Group, place: int, part: Contribution, now: float) -> Event:
        check, first = self._call_check(group, place, part)
        recorded = None if check is None else check.recorded
        phase: Phase = "backward" if in_backward() else "forward"
        origin: CallRecord | None = None
        if recorded is not None:
            origin = recorded.origin
            if recorded.role:
                phase = "tangent" if recorded.role == TANGENT else "backward"
        made_by = None if origin is None else self._made_by.get(id(origin))
        event = Event(
            number=len(self.events),
            rank=group.ranks[place],
            op=op_of(part),
            verb="" if check is None else check.verb,
            axis=self._axis(group),
            size=len(group.ranks),
            payload=payload_of(part),
            sent=sent_by(place, part, len(group.ranks)),
            phase=phase,
            line=show(part.site),
            origin=None if made_by is None else made_by[1].number,
            of="" if origin is None else show(origin.site),
            called=now,
        )
        if recorded is not None and first:
            self._made_by[id(recorded)] = recorded, event
        self.events.append(event)
        return event

    def _call_check(self, group: Group, place: int, part: Contribution) -> tuple[OpCallCheck | None, bool]:
        """The verb's call check, and whether this is the verb's first transfer.

        A verb may need several transfers; only the first has a call check, and the others have the same call site.
        """
        key = group, place
        if isinstance(part.call_check, OpCallCheck):
            self._last[key] = part.call_check, part.site
            return part.call_check, True
        last = self._last.get(key)
        if last is not None and part.direct and last[1] == part.site:
            return last[0], False
        self._last.pop(key, None)
        return None, False

    def _axis(self, group: Group) -> str:
        name = self._axes.get(group)
        if name is None:
            name = self._axes[group] = self._name(group)
        return name

    def _name(self, group: Group) -> str:
        along = axes_of(group.ranks, self._mesh)
        if along:
            return "+".join(along)
        if group.purpose.startswith("mesh_") and group.purpose != "mesh_default":
            return group.purpose.removeprefix("mesh_")
        return "world" if len(group.ranks) == group.world.size else group.name


def axes_of(ranks: list[int], mesh: Mapping[str, int]) -> list[str]:
    """The axes of a mesh along which the ranks differ.

    >>> axes_of([0, 8], {"outer": 2, "inner": 8}), axes_of([1, 3], {"outer": 2, "inner": 8})
    (['outer'], ['inner'])
    """
    found, stride = [], 1
    for name, size in reversed(list(mesh.items())):
        if len({rank // stride % size for rank in ranks}) > 1:
            found.append(name)
        stride *= size
    return found[::-1]


def show(site: Site) -> str:
    """A call site as text; files below the current directory with their relative path."""
    if site is None:
        return "an unknown line"
    file, here = site[0].co_filename, os.getcwd() + os.sep
    return f"{file.removeprefix(here)}:{site[1]} in {site[0].co_name}"
