"""Plans are stored, copied and made in inference mode, and are the same plans; what cannot be pickled says so."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan, HeteroPlan
from tests.conftest import Run
from tests.graph_programs import Program, differences

Ranks = Callable[[int], Run]

EDGES, OWNER = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), torch.tensor([0, 0, 1, 1])
TYPED = {("a", "to", "b"): EDGES, ("b", "to", "a"): EDGES.flip(0)}
OWNERS = {"a": OWNER, "b": 1 - OWNER}


def plain() -> GraphPlan:
    return GraphPlan(EDGES, OWNER)


def typed() -> HeteroPlan:
    return HeteroPlan(TYPED, OWNERS, hops=2)


def as_made(made: str) -> list[str]:
    programs = [
        Program(21, made=made, partition="random", given="parts and owner", overlapped=True, ordered=True),
        Program(22, made=made, partition="one rank empty", given="whole", hops=2, masks=True),
        Program(23, made=made, partition="random", given="root", overlapped=True, ordered=True, masks=True),
    ]
    return [f"{program}: {said}" for program in programs for said in differences(program)]


@pytest.mark.parametrize(
    "made", ["stored", "copied", "deeply copied", "rebuilt", "in inference mode", "under no_grad"]
)
def test_a_plan_is_the_same_plan_whatever_became_of_it(made: str, threads: Ranks) -> None:
    assert threads(3)(as_made, made) == [[]] * 3


def loaded_in_inference_mode() -> list[bool]:
    file = io.BytesIO()
    torch.save((plain().state(), typed().state()), file)
    file.seek(0)
    with torch.inference_mode():
        first, second = torch.load(file, weights_only=True)
        one, two = GraphPlan.of_state(first), HeteroPlan.of_state(second)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    loss = one.scatter_add(one.exchange(x)[one.edge_index[0]]).pow(3).sum()
    rows = two.exchange({"a": x})["a"]
    relation = ("a", "to", "b")
    loss = loss + two.scatter_add({relation: rows[two.edges[relation].edge_index[0]]})["b"].pow(3).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (second_order,) = torch.autograd.grad(grad.pow(2).sum(), x)
    return [one.digest == plain().digest, two.digest == typed().digest, bool(second_order.abs().sum() > 0)]


def test_a_state_that_is_loaded_in_inference_mode_can_be_trained_through(threads: Ranks) -> None:
    assert threads(2)(loaded_in_inference_mode) == [[True] * 3] * 2


def pickled() -> list[str]:
    said = []
    for plan in (plain(), typed(), typed().rows["a"]):
        for way in (pickle.dumps, lambda plan: torch.save({"plan": plan}, io.BytesIO())):
            try:
                way(plan)
            except gm.ArgumentError as error:
                said.append(str(error))
        assert type(copy.copy(plan)) is type(copy.deepcopy(plan)) is type(plan)
    return said


def test_pickling_a_plan_says_to_store_its_state(threads: Ranks) -> None:
    for said in threads(2)(pickled):
        assert len(said) == 6
        assert all("plan.state()" in one and "of_state" in one for one in said)


def copies() -> list[bool]:
    plan = typed()
    shallow, deep = copy.copy(plan), copy.deepcopy(plan)
    before = plan.digest
    deep.edges["a", "to", "b"].edge_index.zero_()
    return [
        shallow.rows is plan.rows,
        deep.rows is not plan.rows,
        deep.axis is plan.axis,
        plan.digest == before == shallow.digest != deep.digest,
    ]


def test_a_deep_copy_shares_nothing_but_the_ranks(threads: Ranks) -> None:
    assert threads(2)(copies) == [[True] * 4] * 2


def digests() -> list[str]:
    plans = (
        typed(),
        HeteroPlan(TYPED, OWNERS),
        typed().rebuilt({key: edges.flip(1) for key, edges in TYPED.items()}),
        typed().rebuilt({("a", "to", "b"): TYPED["a", "to", "b"], ("b", "at", "a"): TYPED["b", "to", "a"]}),
        HeteroPlan(TYPED, {kind: 1 - owner for kind, owner in OWNERS.items()}, hops=2),
        typed(),
    )
    return [plan.digest for plan in plans]


def test_digest_of_a_hetero_plan_distinguishes_plans(threads: Ranks) -> None:
    first, second = threads(2)(digests)
    assert first[0] == first[-1]
    assert len({*first, *second}) == 10


def broken(name: str) -> str:
    """A state of which something is wrong, on rank 1 or on both."""
    right, wrong = typed().state(), copy.deepcopy(typed().state())
    rows, edges = wrong["rows"]["a"], wrong["relations"]["a", "to", "b"]
    other = HeteroPlan({("a", "to", "b"): EDGES}, OWNERS, hops=2).state()
    match name:
        case "no state":
            wrong = {"version": 1}
        case "a plan of one type":
            wrong = plain().state()
        case "rows that are missing":
            del rows["send"]
        case "floats":
            rows["owner"] = rows["owner"].float()
        case "rows that are not there":
            rows["send"] = rows["send"] + 2
        case "an edge that is not there":
            edges["edge_index"] = edges["edge_index"] + 7
        case "an edge twice":
            edges["interior"] = torch.cat((edges["interior"], edges["boundary"]))
        case "a type without rows":
            del wrong["rows"]["b"]
        case "another rank":
            wrong["rank"] = 1 - wrong["rank"]
        case "no hops":
            wrong["hops"] = 0
        case "other relations":
            wrong = other
        case "other rows":
            wrong = typed().rebuilt({key: edges.flip(1).flip(0) for key, edges in TYPED.items()}).state()
            wrong["rows"]["a"]["send"] = wrong["rows"]["a"]["send"].flip(0)
            wrong["rows"]["a"]["send"][:] = 1
    try:
        HeteroPlan.of_state(wrong if gm.rank() else right)
    except gm.GradmeshError as error:
        typed().gather({"a": torch.ones(2)})  # the next call is right
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no state", "not a valid plan state"),
        ("a plan of one type", "not a valid plan state"),
        ("rows that are missing", "not a valid plan state"),
        ("floats", "not a valid plan state"),
        ("rows that are not there", "not a valid plan state"),
        ("an edge that is not there", "not a valid plan state"),
        ("an edge twice", "not a valid plan state"),
        ("a type without rows", "not a valid plan state"),
        ("another rank", "the state belongs to another rank"),
        ("no hops", "not a valid plan state"),
        ("other relations", "the same types and relations on every rank"),
        ("other rows", "belong to different plans"),
    ],
)
def test_a_broken_state_is_refused_on_every_rank(name: str, text: str, threads: Ranks) -> None:
    said = threads(2)(broken, name)
    assert text in said[1]
    assert "nothing was refused" not in said[0]


def of_plain(name: str, change: Any) -> str:
    state = plain().state()
    tensor = state[name]
    assert isinstance(tensor, torch.Tensor)
    try:
        GraphPlan.of_state({**state, name: change(tensor) if gm.rank() else tensor})
    except gm.GradmeshError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    "name", ["owner", "own", "remote", "send", "edge_index", "interior", "by_rank", "places"]
)
@pytest.mark.parametrize(
    "change", [lambda x: x + 9, lambda x: x - 9, lambda x: x.to_sparse(), lambda x: x[:, None]]
)
def test_numbers_that_are_none_in_a_state_are_refused_on_every_rank(
    name: str, change: Any, threads: Ranks
) -> None:
    said = threads(2)(of_plain, name, change)
    assert "not a valid plan state" in said[1]
    assert "nothing was refused" not in said[0]
