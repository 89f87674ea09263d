"""Plans as tensors and ints, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, cast

from torch import Tensor

from gradmesh.arguments import Call
from gradmesh.nn.graph.agree import agree, words
from gradmesh.nn.graph.edges import Edges
from gradmesh.nn.graph.rows import Rows
from gradmesh.nn.graph.stored import EDGES, ROWS, are_edges, are_rows, plain, put_edges, put_rows, take_rows

__all__ = ["put", "put_types", "take", "take_types"]

_KINDS = ("whole", "root", "parts")
_VERSION = 1


def put(plan: Rows) -> dict[str, Tensor | int]:
    """The state of a `GraphPlan`, whose tensors it shares."""
    fields = vars(plan)
    return {
        **_header(plan.axis.rank, plan.axis.size, fields["hops"]),
        "kind": _KINDS.index(fields["_kind"]),
        "root": fields["_root"],
        **put_rows(plan),
        **put_edges(plan),
    }


def take(state: Mapping[str, Tensor | int], call: Call) -> dict[str, Any]:
    """The fields of a `GraphPlan`, of its state on this rank; every rank sees that they fit together."""
    numbers = _numbers(state, ROWS.union(EDGES), ("kind", "root"), call)
    rows, edges = ({name: cast("Tensor", state[name]) for name in names} for names in (ROWS, EDGES))
    if (
        not are_rows(rows, numbers["ranks"])
        or not are_edges(edges, (len(rows["hop"]),) * 2)
        or numbers["kind"] not in range(len(_KINDS))
    ):
        _refuse(state, call)
    _see_rank(numbers, call)
    return {
        **take_rows(rows, call, [numbers[name] for name in ("kind", "root", "hops")]),
        **{name: plain(each) for name, each in edges.items()},
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
        "rows": {kind: put_rows(each) for kind, each in rows.items()},
        "relations": {relation: put_edges(each) for relation, each in edges.items()},
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
        or not all(isinstance(kind, str) and are_rows(part, numbers["ranks"]) for kind, part in rows.items())
        or not all(
            isinstance(relation, tuple)
            and len(relation) == 3
            and {relation[0], relation[2]} <= set(rows)
            and are_edges(part, (len(rows[relation[0]]["hop"]), len(rows[relation[2]]["hop"])))
            for relation, part in relations.items()
        )
    ):
        _refuse(state, call)
    _see_rank(numbers, call)
    agree(call.axis, call.verb, "types and relations", words(list(rows), list(relations)))
    told = [numbers["hops"]]
    fields = {kind: take_rows(rows[kind], call, told, kind) for kind in sorted(rows)}
    edges = {key: Edges(*(plain(relations[key][name]) for name in EDGES)) for key in sorted(relations)}
    return numbers["hops"], fields, edges


def _header(rank: int, ranks: int, hops: int) -> dict[str, int]:
    return {"version": _VERSION, "rank": rank, "ranks": ranks, "hops": hops}


def _numbers(
    state: Mapping[str, Any], parts: set[str], further: tuple[str, ...], call: Call
) -> dict[str, int]:
    """The ints of a state that has these parts."""
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
        "this is no state of a plan",
        expected="what plan.state() returned",
        got=listed,
        remedy="save and load it as it is",
    )


def _see_rank(numbers: Mapping[str, int], call: Call) -> None:
    axis = call.axis
    if (numbers["rank"], numbers["ranks"]) != (axis.rank, axis.size):
        call.fail(
            "this is the state of another rank",
            expected=f"that of rank {axis.rank} of {axis.size}",
            got=f"that of rank {numbers['rank']} of {numbers['ranks']}",
            remedy="hand in what this rank saved; for another number of ranks, make the plan anew",
        )
