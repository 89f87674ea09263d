"""A plan as tensors and ints, and back."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gradmesh.arguments import Call
from gradmesh.collectives import all_gather
from gradmesh.errors import MismatchError, message
from gradmesh.nn.graph.given import checksum
from gradmesh.ops.neighbor import Picked
from gradmesh.ops.sizes import Sizes

__all__ = ["digest", "put", "take"]

_TENSORS = (
    "owner",
    "own",
    "remote",
    "_by_rank",
    "_places",
    "hop",
    "edge_index",
    "edges",
    "interior",
    "boundary",
)
_KINDS = ("whole", "root", "parts")
_VERSION = 1


def put(fields: Mapping[str, Any]) -> dict[str, Tensor | int]:
    """The state of a plan's fields, whose tensors it shares."""
    picked: Picked = fields["_picked"]
    counted = {"counts": fields["counts"], "sent": picked.sent.told, "received": picked.received.told}
    return {
        "version": _VERSION,
        "rank": fields["axis"].rank,
        "ranks": fields["axis"].size,
        "kind": _KINDS.index(fields["_kind"]),
        "root": fields["_root"],
        "hops": fields["hops"],
        **{name.lstrip("_"): fields[name] for name in _TENSORS},
        "send": picked.index,
        **{name: torch.tensor(numbers) for name, numbers in counted.items()},
    }


def digest(state: Mapping[str, Tensor | int]) -> str:
    """A number made of all of a state."""
    made = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        numbers = value.reshape(-1).tolist() if isinstance(value, Tensor) else [value]
        made.update(f"{name}:{len(numbers)};".encode())
        made.update(array("q", numbers).tobytes())
    return made.hexdigest()


def take(state: Mapping[str, Tensor | int], call: Call) -> dict[str, Any]:
    """The fields of a plan, of its state on this rank; every rank sees that they fit together."""
    axis = call.axis
    needed = {name.lstrip("_") for name in _TENSORS} | {"send", "counts", "sent", "received"}
    numbers = {"version", "rank", "ranks", "kind", "root", "hops"}
    plain = isinstance(state, Mapping) and set(state) == needed | numbers
    if (
        not plain
        or state["version"] != _VERSION
        or not all(isinstance(state[name], Tensor) for name in needed)
        or not all(type(state[name]) is int for name in numbers)
        or state["kind"] not in range(len(_KINDS))
        or not _is_whole(state)
    ):
        call.fail(
            "this is no state of a plan",
            expected="what plan.state() returned",
            got=f"{type(state).__name__} of {', '.join(map(str, state)) if isinstance(state, Mapping) else state!r}",
            remedy="save and load it as it is",
        )
    if (state["rank"], state["ranks"]) != (axis.rank, axis.size):
        call.fail(
            "this is the state of another rank",
            expected=f"that of rank {axis.rank} of {axis.size}",
            got=f"that of rank {state['rank']} of {state['ranks']}",
            remedy="hand in what this rank saved; for another number of ranks, make the plan anew",
        )
    tensors: dict[str, Tensor] = {name: state[name] for name in needed}  # type: ignore[misc]  # seen above
    counts, sent, received = (tensors[name].tolist() for name in ("counts", "sent", "received"))
    told = [state[name] for name in ("kind", "root", "hops")]
    _see_that_they_fit(
        call,
        [*told, checksum(tensors["owner"])],
        _told(tensors, "sent"),
        _told(tensors, "received"),
        tensors["send"].device,
    )
    picked = Picked(tensors["send"], Sizes(tuple(sent)), Sizes(tuple(received)), len(tensors["own"]))
    return {
        "axis": axis,
        **{name: tensors[name.lstrip("_")] for name in _TENSORS},
        "counts": tuple(counts),
        "hops": state["hops"],
        "_kind": _KINDS[state["kind"]],
        "_root": state["root"],
        "_picked": picked,
        "_in_order": bool((tensors["owner"][1:] >= tensors["owner"][:-1]).all()),
    }


def _is_whole(state: Mapping[str, Tensor | int]) -> bool:
    """Whether the tensors are numbers, as many as they say."""
    tensors = {name: each for name, each in state.items() if isinstance(each, Tensor)}
    if any(each.dtype != torch.int64 for each in tensors.values()):
        return False
    amounts = [tensors[name] for name in ("counts", "sent", "received")]
    return (
        all(tuple(each.shape) == (state["ranks"],) for each in amounts)
        and int(tensors["sent"].sum()) == len(tensors["send"])
        and int(tensors["received"].sum()) == len(tensors["remote"])
    )


def _told(tensors: Mapping[str, Tensor], name: str) -> list[tuple[int, int]]:
    """How many rows go to each rank, or come from it, and a checksum of which."""
    nodes = tensors["own"][tensors["send"]] if name == "sent" else tensors["remote"]
    return [(len(part), checksum(part)) for part in nodes.split(tensors[name].tolist())]


def _see_that_they_fit(
    call: Call,
    told: Sequence[Tensor | int],
    sent: Sequence[tuple[int, int]],
    received: Sequence[tuple[int, int]],
    device: torch.device,
) -> None:
    """Compare what each rank sends with what the others receive, and what is the same on all of them."""
    ranks = call.axis.size
    row = torch.tensor([[*told, *chain(*sent), *chain(*received)]], device=device)
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
