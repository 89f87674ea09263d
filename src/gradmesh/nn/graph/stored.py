"""Rows and edges as tensors, and back: what the states of plans are made of."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import Tensor

from gradmesh.arguments import Call
from gradmesh.collectives import all_gather
from gradmesh.errors import MismatchError, message
from gradmesh.nn.graph.agree import checksum, meeting
from gradmesh.nn.graph.edges import is_table
from gradmesh.nn.graph.rows import Rows
from gradmesh.ops.neighbor import Picked
from gradmesh.ops.sizes import Sizes

__all__ = ["EDGES", "ROWS", "are_edges", "are_rows", "digest", "plain", "put_edges", "put_rows", "take_rows"]

_FIELDS = ("owner", "own", "remote", "hop", "_by_rank", "_places")
_AMOUNTS = ("counts", "sent", "received")
ROWS = {*(name.lstrip("_") for name in _FIELDS), "send", *_AMOUNTS}
"""The names of the tensors that rows are stored as."""

EDGES = ("edge_index", "edges", "interior", "boundary")
"""The names of those that edges are stored as."""


def put_rows(rows: Rows) -> dict[str, Tensor]:
    """The tensors of rows, which they share."""
    fields = vars(rows)
    picked: Picked = fields["_picked"]
    amounts = zip(_AMOUNTS, (rows.counts, picked.sent.explicit, picked.received.explicit), strict=True)
    return {
        **{name.lstrip("_"): fields[name] for name in _FIELDS},
        "send": picked.index,
        **{name: torch.tensor(numbers) for name, numbers in amounts},
    }


def take_rows(
    part: Mapping[str, Tensor], call: Call, told: Sequence[int], kind: str | None = None
) -> dict[str, Any]:
    """The fields of rows; every rank calls it, and sees that what each sends is what the others receive.

    Args:
        part: what `put_rows` returned on this rank.
        call: the call.
        told: numbers that are the same on every rank.
        kind: the type of the nodes.
    """
    part = {name: plain(each) for name, each in part.items()}
    _see_that_they_fit(call, [*told, checksum(part["owner"])], _told(part, "sent"), _told(part, "received"))
    sent, received = (Sizes(tuple(part[name].tolist())) for name in ("sent", "received"))
    return {
        "axis": call.axis,
        "kind": kind,
        **{name: part[name.lstrip("_")] for name in _FIELDS},
        "counts": tuple(part["counts"].tolist()),
        "_picked": Picked(part["send"], sent, received, len(part["own"])),
        "_in_order": bool((part["owner"][1:] >= part["owner"][:-1]).all()),
        "_ops": {},
    }


def put_edges(edges: object) -> dict[str, Tensor]:
    """The tensors of edges, or of a plan that has them."""
    return {name: getattr(edges, name) for name in EDGES}


def plain(x: Tensor) -> Tensor:
    """A tensor that a backward may keep: one that was loaded in inference mode may not be kept."""
    return x.clone() if x.is_inference() else x


def are_rows(part: object, ranks: int) -> bool:
    """Whether these are the tensors of rows, as long as they say, with numbers of what there is."""
    if not _are_tensors(part, ROWS):
        return False
    own, remote, nodes = len(part["own"]), len(part["remote"]), len(part["owner"])
    limits = {"owner": ranks, "own": nodes, "remote": nodes, "by_rank": nodes, "places": nodes, "send": own}
    return (
        all(tuple(part[name].shape) == (ranks,) for name in _AMOUNTS)
        and all(part[name].dim() == 1 and _within(part[name], most) for name, most in limits.items())
        and len(part["by_rank"]) == len(part["places"]) == int(part["counts"].sum()) == nodes
        and int(part["sent"].sum()) == len(part["send"])
        and int(part["received"].sum()) == remote
        and len(part["hop"]) == own + remote
    )


def are_edges(part: object, rows: tuple[int, int]) -> bool:
    """Whether these are the tensors of edges between rows of which there are as many."""
    if not _are_tensors(part, EDGES) or part["edge_index"].dim() != 2 or len(part["edge_index"]) != 2:
        return False
    count = part["edge_index"].shape[1]
    return (
        all(_within(ends, most) for ends, most in zip(part["edge_index"], rows, strict=True))
        and tuple(part["edges"].shape) == (count,)
        and all(part[name].dim() == 1 and _within(part[name], count) for name in ("interior", "boundary"))
        and len(part["interior"]) + len(part["boundary"]) == count
    )


def _are_tensors(part: object, names: Collection[str]) -> TypeGuard[Mapping[str, Tensor]]:
    return (
        isinstance(part, Mapping)
        and set(part) == set(names)
        and all(
            is_table(each, each.dim(), (torch.int64,)) for each in part.values() if isinstance(each, Tensor)
        )
        and all(isinstance(each, Tensor) for each in part.values())
    )


def _within(numbers: Tensor, most: int) -> bool:
    return not numbers.numel() or (int(numbers.min()) >= 0 and int(numbers.max()) < most)


def digest(state: Mapping[Any, Any]) -> str:
    """A number made of all of a state."""
    made = hashlib.sha256()
    for name, value in _flat(state):
        numbers = value.reshape(-1).tolist() if isinstance(value, Tensor) else [value]
        made.update(f"{name}:{len(numbers)};".encode())
        made.update(array("q", numbers).tobytes())
    return made.hexdigest()


def _flat(state: Mapping[Any, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Each tensor and number with its name, where states lie in states too."""
    for name in sorted(state):
        if isinstance(state[name], Mapping):
            yield from _flat(state[name], f"{within}{name!r}.")
        else:
            yield f"{within}{name}", state[name]


def _told(tensors: Mapping[str, Tensor], name: str) -> list[tuple[int, int]]:
    """How many rows go to each rank, or come from it, and a checksum of which."""
    nodes = tensors["own"][tensors["send"]] if name == "sent" else tensors["remote"]
    return [(len(part), checksum(part)) for part in nodes.split(tensors[name].tolist())]


def _see_that_they_fit(
    call: Call, told: Sequence[int], sent: Sequence[tuple[int, int]], received: Sequence[tuple[int, int]]
) -> None:
    """Compare what each rank sends with what the others receive, and what is the same on all of them."""
    ranks = call.axis.size
    row = torch.tensor([[*told, *chain(*sent), *chain(*received)]], device=meeting(call.axis))
    table = all_gather(row, call.axis).tolist()
    sends, takes = (
        [_pairs(row[begin:][: 2 * ranks]) for row in table] for begin in (len(told), len(told) + 2 * ranks)
    )
    differing = [
        f"rank {a} sends rank {b} {sends[a][b][0]} rows of {takes[b][a][0]}"
        + (", but others" if sends[a][b][0] == takes[b][a][0] else "")
        for a in range(ranks)
        for b in range(ranks)
        if sends[a][b] != takes[b][a]
    ]
    if differing or any(row[: len(told)] != table[0][: len(told)] for row in table):
        raise MismatchError(
            message(
                "the ranks' states are not those of one plan",
                op=call.verb,
                axis=str(call.axis),
                expected="states that were saved together",
                got="; ".join(differing[:3]) or "another partition, or other numbers of hops, on the ranks",
                remedy="load the states of one checkpoint",
            )
        )


def _pairs(numbers: list[int]) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))
