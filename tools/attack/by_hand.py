"""Calls inside of a Function of the program's own, whose backward calls the adjoint by hand, as much old code does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tools.attack.calls import BY_HAND, Verb
from tools.attack.statements import Region, Statement


def adjoint(verb: Verb) -> Verb | None:
    """The call that a backward written by hand makes; None where no single verb is it."""
    params = dict(verb.params)
    if params.get("sizes") == "auto" or any(key.endswith("_dtype") for key in params):
        return None
    made = _adjoint(verb.verb, params)
    return None if made is None else replace(verb, verb=made[0], params=tuple(made[1].items()), way="")


def _adjoint(verb: str, params: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    if verb == "all_gather" and params["dst"] == "R":
        return "reduce_scatter", {key: value for key, value in params.items() if key != "dst"}
    if verb == "reduce_scatter" and params["op"] == "sum":
        return "all_gather", {key: value for key, value in params.items() if key != "op"}
    if verb == "all_reduce" and params == {"op": "sum", "dst": "R"}:
        return verb, params
    if verb in ("scan", "exscan"):
        return verb, {"reverse": not params["reverse"]}
    if verb == "shift" and "sizes" not in params:
        return verb, {**params, "offset": -params["offset"]}
    if verb == "permute" and "sizes" not in params:
        return verb, {**params, "pairs": [(target, source) for source, target in params["pairs"]]}
    if verb == "all_to_all":
        other = {"split": "concat", "concat": "split"}
        return verb, {
            f"{other[key.split('_')[0]]}_{key.split('_')[1]}": value for key, value in params.items()
        }
    return None


def with_by_hand(statements: Sequence[Statement], rng: random.Random, share: float) -> tuple[Statement, ...]:
    """The statements with some of their calls inside of a Function."""
    made: list[Statement] = []
    for statement in statements:
        if isinstance(statement, Region):
            body = with_by_hand(statement.body, rng, share)
            made.append(replace(statement, body=body))  # type: ignore[arg-type]  # of the same kinds as before
        elif (
            isinstance(statement, Verb) and not statement.way and adjoint(statement) and rng.random() < share
        ):
            made.append(replace(statement, way=BY_HAND, adjoint=adjoint(statement)))
        else:
            made.append(statement)
    return tuple(made)
