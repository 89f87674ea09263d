"""Named dimensions: a name does what its number does, in every verb that takes one; and names are checked."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gradmesh as gm
from gradmesh.type_inference.rules import rule_of
from gradmesh.verbs import call

Ranks = Callable[[int], Callable[..., list[Any]]]
NAMES = ("N", "C", "T", "H")
PAGE = Path(__file__).parent.parent / "docs" / "named-dims.md"

WITH_DIM: dict[str, dict[str, Any]] = {
    "all_gather": {},
    "gather": {},
    "halo_exchange": {"halo": 2},
    "permute": {"pairs": [(0, 1), (1, 0)], "sizes": "auto"},
    "reduce_scatter": {},
    "scatter": {},
    "shard": {},
    "shift": {"sizes": "auto"},
    "sizes": {},
}
"""The verbs that take `dim`, with arguments by which it counts."""


def test_every_verb_that_takes_a_dim_is_tried_here() -> None:
    takes = {name for name in gm.__all__ if "dim" in signature(name) and name not in ("named", "names")}
    assert takes == set(WITH_DIM)
    assert {"split_dim", "concat_dim"} < signature("all_to_all")


def signature(name: str) -> set[str]:
    value = getattr(gm, name)
    return set(inspect.signature(value).parameters) if inspect.isfunction(value) else set()


def one(seed: int, rank: int) -> tuple[str, dict[str, Any], dict[str, Any], Tensor, tuple[str | None, ...]]:
    """A verb, its arguments by number and by name, an operand and its names; the same on every rank but for values."""
    draw = random.Random(seed)
    verb = draw.choice([*WITH_DIM, "all_to_all", "all_gather", "structure"])
    count = draw.randint(1, 3)
    names: list[str | None] = list(draw.sample(NAMES, count))
    shape = [draw.choice([6, 12]) for _ in range(count)]
    dim = draw.randrange(count)
    for other in range(count):
        if other != dim and draw.random() < 0.3 and verb != "all_to_all":
            names[other] = None
    if verb == "scatter" and rank > 0:
        shape[dim] = 0
    numbers: dict[str, Any] = {"dim": dim, **WITH_DIM.get(verb, {})}
    named: dict[str, Any] = numbers | {"dim": names[dim]}
    if verb == "all_to_all":
        join = draw.randrange(count)
        numbers = {"split_dim": dim, "concat_dim": join}
        named = {"split_dim": names[dim], "concat_dim": names[join]}
    if draw.random() < 0.3 and verb != "sizes":
        numbers, named = numbers | {"async_op": True}, named | {"async_op": True}
    generator = torch.Generator().manual_seed(97 * seed + rank)
    return verb, numbers, named, torch.randn(shape, dtype=torch.float64, generator=generator), tuple(names)


def result(verb: str, x: Tensor, arguments: dict[str, Any]) -> Any:
    if verb == "structure":
        return gm.all_gather({"x": x}, **arguments)
    return getattr(gm, verb)(x, **arguments)


def attacked(seeds: range) -> list[str]:
    """Where a name did something else than its number, in value, gradient or names."""
    wrong = []
    rank = gm.rank()
    for seed in seeds:
        verb, numbers, named, value, names = one(seed, rank)
        found: list[tuple[Any, Any, Any]] = []
        for arguments in (numbers, named):
            x = value.clone().requires_grad_()
            if arguments is named:
                gm.named(x, *names)
            if verb == "sizes":
                found.append((gm.sizes(x, **arguments), None, names))
                continue
            try:
                with gm.ordered():
                    y = result(verb, x, arguments)
                    y = y.wait() if isinstance(y, gm.Pending) else y
                    y = y["x"] if verb == "structure" else y
                    gm.backward((1 + rank) * (y**3).sum() if seed % 3 or rank else None)
            except gm.GradmeshError as error:
                found.append((error, None, None))
                continue
            found.append((y.detach(), x.grad, gm.names(y)))
        (a, da, _), (b, db, reported) = found
        same = torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        if not same or reported != names or (da is not None and not torch.equal(da, cast("Tensor", db))):
            wrong.append(f"{seed}: {verb} {numbers} {named}")
    return wrong


def test_dim_name_equals_its_number_on_threads(threads: Ranks) -> None:
    assert threads(3)(attacked, range(120)) == [[]] * 3


@pytest.mark.processes
def test_dim_name_equals_its_number_on_processes(processes: Ranks) -> None:
    assert processes(2)(attacked, range(40)) == [[]] * 2


def test_the_attack_sees_a_name_that_means_another_dimension(
    threads: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "dim_number", lambda *given: given[3].dim() - 1)
    assert all(threads(3)(attacked, range(40)))


def names_of_results() -> dict[str, object]:
    x = gm.named(torch.ones(4, 6), "N", "C")
    peer = 1 - gm.rank()
    found = {
        "all_reduce": gm.all_reduce(x, dst=gm.R),
        "max": gm.all_reduce(x, op="max", dst=gm.R),
        "logsumexp": gm.all_reduce(x, op="logsumexp", dst=gm.I),
        "prod, later": gm.all_reduce(x, op="prod", dst=gm.I, async_op=True).wait(),
        "max, later": gm.all_reduce(x, op="max", dst=gm.I, async_op=True).wait(),
        "broadcast": gm.broadcast(x),
        "reduce": gm.reduce(x),
        "replicate": gm.replicate(x),
        "convert": gm.convert(x, src=gm.R, dst=gm.P),
        "convert, later": gm.convert(x, src=gm.R, dst=gm.P, async_op=True).wait(),
        "shift": gm.shift(x),
        "permute": gm.permute(x, pairs=[(0, 1)]),
        "scan": gm.scan(x),
        "exscan": gm.exscan(x),
        "future": gm.all_gather(x, async_op=True).future().wait(),
        "structure": gm.all_reduce([x, torch.ones(3)], dst=gm.R)[0],
        "neighbor": gm.neighbor_all_to_all(x, send_rows={peer: torch.tensor([0])}, receive_counts={peer: 1}),
        "exchange": gm.exchange([x, x])[0],
    }
    with gm.coalesce():
        coming = gm.all_reduce(x, dst=gm.R, async_op=True)
    found["coalesce"] = coming.wait()
    if gm.rank() == 0:
        gm.send(x, to=1)
    else:
        found["recv"] = gm.recv(gm.named(torch.empty(4, 6), "N", "C"), source=0)
    return {name: gm.names(y) for name, y in found.items() if gm.names(y) != ("N", "C")}


def test_the_result_of_every_verb_has_the_names_of_its_operand(threads: Ranks) -> None:
    assert threads(2)(names_of_results) == [{}, {}]


def outcome(work: Callable[[], object]) -> tuple[str, str]:
    try:
        work()
    except gm.GradmeshError as error:
        return type(error).__name__, str(error)
    return "", ""


def refused(alone: bool) -> dict[str, tuple[str, str]]:
    """What a name that is not there ends in: on all ranks, or on rank 0 alone."""
    wrong = not alone or gm.rank() == 0
    x = gm.named(torch.ones(4, 6), "N", "C")
    found = {}
    for verb, arguments in WITH_DIM.items():
        run = functools.partial(getattr(gm, verb), **arguments)
        found[verb] = outcome(functools.partial(run, x, dim="T" if wrong else "C"))
        found[f"{verb} unnamed"] = outcome(functools.partial(run, x + 1 if wrong else x, dim="C"))
    to_all: Any = gm.all_to_all
    for name in ("split_dim", "concat_dim"):
        found[name] = outcome(functools.partial(to_all, x, **{name: "T" if wrong else "C"}))
    assert gm.all_gather(x, dim="C").shape == (4, 12)  # the next call is right
    return found


def test_a_name_that_is_not_there_is_refused_on_every_rank(threads: Ranks) -> None:
    for table in threads(2)(refused, False):
        assert {name: got[0] for name, got in table.items() if got[0] != "ArgumentError"} == {}
        assert "'N', 'C'" in table["all_gather"][1]
        assert "gradmesh.named(" in table["all_gather unnamed"][1]
        assert "concat_dim one of 'N', 'C'" in table["concat_dim"][1]


def test_name_missing_on_one_rank_raises_on_the_others(threads: Ranks) -> None:
    wrong, right = threads(2)(refused, True)
    assert {name: got[0] for name, got in wrong.items() if got[0] != "ArgumentError"} == {}
    # shard sends nothing
    reported = {name: got[0] for name, got in right.items() if got[0] != "MismatchError"}
    assert set(reported) == {"shard", "shard unnamed"}, reported
    assert "no dimension is named" in right["all_gather"][1]


def named_otherwise(verbs: list[str]) -> dict[str, str]:
    value = torch.ones(6, 6)
    found = {}
    for how in ("otherwise", "not at all"):
        mine = value.clone() if how == "not at all" and gm.rank() else gm.named(value.clone(), "N", "C")
        if how == "otherwise" and gm.rank():
            mine = gm.named(value.clone(), "C", "N")
        for verb in verbs:
            arguments = {"all_reduce": {"dst": gm.R}, "sizes": {}}.get(verb, {})
            kind, text = outcome(functools.partial(getattr(gm, verb), mine, **arguments))
            if kind != "MismatchError" or "dims N, C" not in text:
                found[f"{verb}, {how}"] = kind
    return found


@pytest.mark.processes
def test_ranks_that_name_dimensions_differently_are_refused(processes: Ranks, threads: Ranks) -> None:
    verbs = [
        "all_gather",
        "all_reduce",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "shift",
        "scan",
        "sizes",
    ]
    assert threads(2)(named_otherwise, verbs) == [{}] * 2
    assert processes(2)(named_otherwise, verbs) == [{}] * 2


def messages_named_otherwise() -> str:
    if gm.rank() == 0:
        gm.send(gm.named(torch.ones(2, 2), "N", "C"), to=1)
        return ""
    return outcome(lambda: gm.recv(torch.empty(2, 2), source=0))[0]


def test_the_two_ends_of_a_message_compare_names(threads: Ranks) -> None:
    assert threads(2)(messages_named_otherwise) == ["", "MismatchError"]


def test_names_are_refused_that_are_none() -> None:
    x = torch.zeros(2, 3)
    for names, problem in [
        (("N",), "needs one name or None"),
        (("N", "C", "T"), "needs one name or None"),
        (("N", "N"), "used for two dimensions"),
        (("N", ""), "must be identifiers"),
        (("N", "a b"), "must be identifiers"),
        (("N", 3), "must be identifiers"),
    ]:
        with pytest.raises(gm.ArgumentError, match=problem):
            gm.named(x, *names)  # type: ignore[arg-type]
    with pytest.raises(gm.ArgumentError, match="must be a tensor"):
        gm.named([1.0], "N")  # type: ignore[type-var]
    assert gm.names(x) == (None, None)
    gm.named(x, "N", "C")
    with pytest.raises(gm.ArgumentError, match="other names already"):
        gm.named(x, "C", "N")
    assert gm.names(gm.named(x, "N", "C")) == ("N", "C")
    assert gm.names(gm.named(x.view_as(x), "C", "N")) == ("C", "N")
    assert gm.names(x) == ("N", "C")
    assert gm.names(gm.named(torch.tensor(1.0))) == ()


def transposed_in_place() -> list[str]:
    x = gm.named(torch.arange(9.0).view(3, 3), "N", "C").t_()
    reported = outcome(lambda: gm.all_gather(x, dim="N"))[1]
    assert gm.names(x) == (None, None)
    gm.named(x, "C", "N")
    return [reported, str(gm.all_gather(x, dim="C").shape)]


def test_a_tensor_that_was_turned_in_place_is_not_taken_by_its_old_names(threads: Ranks) -> None:
    for reported, shape in threads(2)(transposed_in_place):
        assert "changed in place after it was named" in reported
        assert shape == "torch.Size([6, 3])"


def test_operators_drop_names_and_a_pickled_tensor_keeps_them() -> None:
    x = gm.named(torch.randn(3, 4), "N", "C")
    for y in (x + 1, x.t(), x.view(4, 3), x.clone(), x.detach(), x[0], x.sum(0), x.to(torch.float64)):
        assert gm.names(y) == (None,) * y.dim()
    assert gm.names(x.add_(1)) == ("N", "C")
    assert gm.names(copy.deepcopy(x)) == ("N", "C")
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert gm.names(torch.load(file, weights_only=True)) == ("N", "C")


def checkpointed(reentrant: bool) -> tuple[str, bool]:
    generator = torch.Generator().manual_seed(gm.rank())
    x = gm.named(torch.randn(2, 4, generator=generator).requires_grad_(), "N", "C")

    def step(x: Tensor) -> Tensor:
        return ((1 + gm.rank()) * gm.all_gather(x, dim="C") ** 3).sum()

    (expected,) = torch.autograd.grad(step(x), x)
    error, _ = outcome(lambda: checkpoint(step, x, use_reentrant=reentrant).backward())
    return error, x.grad is not None and torch.equal(x.grad, expected)


def test_names_are_there_in_a_checkpoint_or_it_is_refused(threads: Ranks) -> None:
    assert threads(2)(checkpointed, False) == [("", True)] * 2
    assert threads(2)(checkpointed, True) == [("ArgumentError", False)] * 2


def compiled() -> list[tuple[str | None, ...]]:
    gm.mesh(tp=-1)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        y = gm.all_gather(x, "tp", dim="C")
        return y, gm.halo_exchange(gm.named(y.sin(), "T", "C"), "tp", dim="T")

    torch._dynamo.reset()
    x = gm.named(torch.randn(2, 3), "N", "C")
    made = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    assert all(torch.equal(one, other) for one, other in zip(made, step(x), strict=True))
    return [gm.names(one) for one in step(x)]


def test_names_mean_the_same_in_a_compiled_program() -> None:
    gm.init()
    try:
        assert compiled() == [("N", "C"), ("T", "C")]
    finally:
        torch.distributed.destroy_process_group()


ROW = re.compile(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)


RULES = {
    "that of the input": {"0"},
    "a P operand is a finding": {"!0", "!0 !1"},
    "linear in both together": {"0+1*2"},
    "linear in each": {"0*1"},
    "linear in the numerator": {"0/1"},
    "the sum of a product and the third": {"0*3+1*2*4"},
    "R or I, depending on use": {"=S"},
    "that of the value": {"=1"},
    "observed at run time": {"~"},
    "that of the out-of-place form": {"!0", "0+1*2"},
}
"""What the page says of the result's type, and the rules of the table that say the same."""


def test_the_pages_rules_of_types_are_those_of_the_table() -> None:
    """Each operator that the page has in a row of name inference has a type rule that the row describes."""
    rows = [(operators, said) for _, operators, said, _ in ROW.findall(PAGE.read_text()) if "`" in operators]
    assert len(rows) >= 8
    for operators, said in rows:
        (rules,) = [rules for start, rules in RULES.items() if said.startswith(start)]
        assert {rule_of(name) for name in re.findall(r"`([^`]+)`", operators)} <= rules, operators
