"""Serialization of plans: tensors and ints."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn, TypeGuard, cast

import torch
from torch import Tensor

from gradmesh.errors import MismatchError, message
from gradmesh.nn.graph.agree import agree, checksum, exchange_device, fingerprint
from gradmesh.nn.graph.edges import Edges, is_table
from gradmesh.nn.graph.rows import Rows
from gradmesh.ops.neighbor import Picked
from gradmesh.ops.sizes import Sizes
from gradmesh.verbs.call import Call
from gradmesh.verbs.collectives import all_gather

__all__ = ["digest", "put", "put_types", "take", "take_types"]

_KINDS = ("whole", "root", "parts")
_VERSION = 1
_FIELDS = ("owner", "own", "remote", "hop", "_by_rank", "_places")
_COUNTS = ("counts", "sent", "received")
_ROWS = {*(name.lstrip("_") for name in _FIELDS), "send", *_COUNTS}
_EDGES = ("edge_index", "edges", "interior", "boundary")


def put(plan: Rows) -> dict[str, Tensor | int]:
    """The state of a `GraphPlan`; shares its tensors."""
    fields = vars(plan)
    return {
        **_header(plan.axis.rank, plan.axis.size, fields["hops"]),
        "kind": _KINDS.index(fields["_kind"]),
        "root": fields["_root"],
        **_put_rows(plan),
        **_put_edges(plan),
    }


def take(state: Mapping[str, Tensor | int], call: Call) -> dict[str, Any]:
    """The fields of a `GraphPlan` from this rank's state. A collective that checks the ranks' states."""
    numbers = _numbers(state, _ROWS.union(_EDGES), ("kind", "root"), call)
    rows, edges = ({name: cast("Tensor", state[name]) for name in names} for names in (_ROWS, _EDGES))
    if (
        not _are_rows(rows, numbers["ranks"])
        or not _are_edges(edges, (len(rows["hop"]),) * 2)
        or numbers["kind"] not in range(len(_KINDS))
    ):
        _refuse(state, call)
    _check_rank(numbers, call)
    return {
        **_take_rows(rows, call, [numbers[name] for name in ("kind", "root", "hops")]),
        **{name: _plain(each) for name, each in edges.items()},
        "hops": numbers["hops"],
        "_kind": _KINDS[numbers["kind"]],
        "_root": numbers["root"],
    }


def put_types(
    rows: Mapping[str, Rows], edges: Mapping[Any, Edges], header: tuple[int, int, int]
) -> dict[str, Any]:
    """The state of a `HeteroPlan`."""
    return {
        **_header(*header),
        "rows": {kind: _put_rows(each) for kind, each in rows.items()},
        "relations": {relation: _put_edges(each) for relation, each in edges.items()},
    }


def take_types(
    state: Mapping[str, Any], call: Call
) -> tuple[int, dict[str, dict[str, Any]], dict[Any, Edges]]:
    """The hops, the fields of each type's rows, and each relation's edges."""
    numbers = _numbers(state, {"rows", "relations"}, (), call)
    rows, relations = state["rows"], state["relations"]
    if (
        not isinstance(rows, Mapping)
        or not isinstance(relations, Mapping)
        or not all(isinstance(kind, str) and _are_rows(part, numbers["ranks"]) for kind, part in rows.items())
        or not all(
            isinstance(relation, tuple)
            and len(relation) == 3
            and {relation[0], relation[2]} <= set(rows)
            and _are_edges(part, (len(rows[relation[0]]["hop"]), len(rows[relation[2]]["hop"])))
            for relation, part in relations.items()
        )
    ):
        _refuse(state, call)
    _check_rank(numbers, call)
    agree(call.axis, call.verb, "types and relations", fingerprint(list(rows), list(relations)))
    fields = {kind: _take_rows(rows[kind], call, [numbers["hops"]], kind) for kind in sorted(rows)}
    edges = {key: Edges(*(_plain(relations[key][name]) for name in _EDGES)) for key in sorted(relations)}
    return numbers["hops"], fields, edges


def _header(rank: int, ranks: int, hops: int) -> dict[str, int]:
    return {"version": _VERSION, "rank": rank, "ranks": ranks, "hops": hops}


def _numbers(
    state: Mapping[str, Any], parts: set[str], further: tuple[str, ...], call: Call
) -> dict[str, int]:
    """The checked ints of a state."""
    names = {*_header(0, 0, 0), *further}
    if (
        not isinstance(state, Mapping)
        or set(state) != names | parts
        or not all(type(state[name]) is int for name in names)
        or state["version"] != _VERSION
        or state["hops"] < 1
    ):
        _refuse(state, call)
    return {name: state[name] for name in names}


def _refuse(state: object, call: Call) -> NoReturn:
    listed = (
        f"{type(state).__name__} of {', '.join(map(str, state))}"
        if isinstance(state, Mapping)
        else repr(state)
    )
    call.fail(
        "the argument is not a valid plan state",
        expected="the dict that plan.state() returned",
        got=listed,
        remedy='save and load it unchanged, e.g. torch.save(plan.state(), "plan.pt")',
    )


def _check_rank(numbers: Mapping[str, int], call: Call) -> None:
    axis = call.axis
    if (numbers["rank"], numbers["ranks"]) != (axis.rank, axis.size):
        call.fail(
            "the state belongs to another rank",
            expected=f"the state of rank {axis.rank} of {axis.size}",
            got=f"the state of rank {numbers['rank']} of {numbers['ranks']}",
            remedy="construct the plan anew for another number of ranks"
            if numbers["ranks"] != axis.size
            else "load the state that this rank saved, e.g. from a file with the rank in its name",
        )


def _put_rows(rows: Rows) -> dict[str, Tensor]:
    """The tensors of rows, not copied."""
    fields = vars(rows)
    picked: Picked = fields["_picked"]
    counts = zip(_COUNTS, (rows.counts, picked.sent.explicit, picked.received.explicit), strict=True)
    return {
        **{name.lstrip("_"): fields[name] for name in _FIELDS},
        "send": picked.index,
        **{name: torch.tensor(numbers) for name, numbers in counts},
    }


def _take_rows(
    part: Mapping[str, Tensor], call: Call, equal: Sequence[int], kind: str | None = None
) -> dict[str, Any]:
    """The fields of `Rows` from `_put_rows`. A collective, which compares `equal` and the rows that are sent."""
    part = {name: _plain(each) for name, each in part.items()}
    _check_pairs(
        call, [*equal, checksum(part["owner"])], _per_rank(part, "sent"), _per_rank(part, "received")
    )
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


def _put_edges(edges: object) -> dict[str, Tensor]:
    """The tensors of edges, or of a plan."""
    return {name: getattr(edges, name) for name in _EDGES}


def _plain(x: Tensor) -> Tensor:
    """A tensor that autograd can save; one that was loaded in inference mode is cloned."""
    return x.clone() if x.is_inference() else x


def _are_rows(part: object, ranks: int) -> bool:
    """True if these are tensors of rows, with consistent lengths and indices in range."""
    if not _are_tensors(part, _ROWS):
        return False
    own, remote, nodes = len(part["own"]), len(part["remote"]), len(part["owner"])
    limits = {"owner": ranks, "own": nodes, "remote": nodes, "by_rank": nodes, "places": nodes, "send": own}
    return (
        all(tuple(part[name].shape) == (ranks,) for name in _COUNTS)
        and all(part[name].dim() == 1 and _within(part[name], most) for name, most in limits.items())
        and len(part["by_rank"]) == len(part["places"]) == int(part["counts"].sum()) == nodes
        and int(part["sent"].sum()) == len(part["send"])
        and int(part["received"].sum()) == remote
        and len(part["hop"]) == own + remote
    )


def _are_edges(part: object, rows: tuple[int, int]) -> bool:
    """True if these are tensors of edges, with indices of so many source and target rows."""
    if not _are_tensors(part, _EDGES) or part["edge_index"].dim() != 2 or len(part["edge_index"]) != 2:
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
    """SHA-256 of a state."""
    made = hashlib.sha256()
    for name, value in _flat(state):
        numbers = value.reshape(-1).tolist() if isinstance(value, Tensor) else [value]
        made.update(f"{name}:{len(numbers)};".encode())
        made.update(array("q", numbers).tobytes())
    return made.hexdigest()


def _flat(state: Mapping[Any, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors and numbers of nested states, with their names."""
    for name in sorted(state):
        if isinstance(state[name], Mapping):
            yield from _flat(state[name], f"{within}{name!r}.")
        else:
            yield f"{within}{name}", state[name]


def _per_rank(tensors: Mapping[str, Tensor], name: str) -> list[tuple[int, int]]:
    """The number and a checksum of the rows that are sent to, or received from, each rank."""
    nodes = tensors["own"][tensors["send"]] if name == "sent" else tensors["remote"]
    return [(len(part), checksum(part)) for part in nodes.split(tensors[name].tolist())]


def _check_pairs(
    call: Call, equal: Sequence[int], sent: Sequence[tuple[int, int]], received: Sequence[tuple[int, int]]
) -> None:
    """Raise on every rank if sent and received rows do not match, or `equal` differs."""
    ranks, shared = call.axis.size, len(equal)
    row = torch.tensor([[*equal, *chain(*sent), *chain(*received)]], device=exchange_device(call.axis))
    table = all_gather(row, call.axis).tolist()
    sends, takes = (
        [_pairs(row[begin:][: 2 * ranks]) for row in table] for begin in (shared, shared + 2 * ranks)
    )
    differing = [
        f"rank {a} sends {sends[a][b][0]} rows to rank {b}, which expects "
        + ("other rows" if sends[a][b][0] == takes[b][a][0] else f"{takes[b][a][0]}")
        for a in range(ranks)
        for b in range(ranks)
        if sends[a][b] != takes[b][a]
    ]
    if differing or any(row[:shared] != table[0][:shared] for row in table):
        raise MismatchError(
            message(
                "the ranks' states belong to different plans",
                op=call.verb,
                axis=str(call.axis),
                expected="states that were saved together",
                got="; ".join(differing[:3]) or "different partitions or numbers of hops",
                remedy="load the states of the same checkpoint on every rank",
            )
        )


def _pairs(numbers: list[int]) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))
