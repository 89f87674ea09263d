"""Types followed through programs: what tensors are, what does not fit, and where gradients lack a sum."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradmesh as gm

Ranks = Callable[[int], Callable[..., list[Any]]]


@pytest.fixture(autouse=True)
def _found_is_looked_at_and_not_raised() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gm.CheckWarning)
        yield


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def own(*shape: int, seed: int = 0) -> torch.Tensor:
    return drawn(*shape, seed=100 * (1 + gm.rank()) + seed)


def kinds(types: gm.Types) -> list[str]:
    return [finding.kind for finding in types.findings]


def everywhere(reported: list[Any]) -> Any:
    """What every rank says alike."""
    assert all(one == reported[0] for one in reported), reported
    return reported[0]


def test_leaves_are_observed_and_verbs_have_the_registrys_types(threads: Ranks) -> None:
    def body() -> list[object]:
        w, x, c = drawn(3).requires_grad_(), own(3), drawn(3, seed=1)
        with gm.typed() as types:
            y = w * x
            made = [w, x, c, y, c + 1, w * c, w * (1 + gm.rank()), gm.all_reduce(y, dst=gm.I)]
            made += [
                gm.all_gather(y),
                gm.shift(c),
                gm.convert(y, src=gm.V, dst=gm.P),
                gm.all_gather(y)[:3] * w,
            ]
            return [types.of(one)["world"] for one in made]

    reported = everywhere(threads(3)(body))
    assert reported == [gm.I, gm.V, gm.R, gm.V, gm.R, gm.I, gm.V, gm.I, gm.R, gm.V, gm.P, gm.R]


def test_partial_value_passes_only_linear_ops(threads: Ranks) -> None:
    def body() -> tuple[list[object], list[str]]:
        with gm.typed() as types:
            p = gm.convert(own(4), src=gm.V, dst=gm.P)
            r = gm.all_gather(own(1, seed=1))
            fine = [p * 2, p + p, p @ drawn(4, 4), p[1:3], torch.cat([p, p]), torch.zeros(4) + p, p * r.sum()]
            reported = [types.of(one)["world"] for one in fine]
            p.exp()
            p * p
            p + 1
            p * own(4)
        return reported, kinds(types)

    reported, found = everywhere(threads(3)(body))
    assert set(reported) == {gm.P}
    assert sorted(found) == [
        "counts-many-times",
        "nonlinear-on-partial",
        "partial-times-varying",
        "product-of-partials",
    ]


def test_op_on_some_ranks_gives_v_without_an_error(threads: Ranks) -> None:
    def body() -> tuple[list[object], list[str]]:
        w = drawn(4).requires_grad_()
        experts = [drawn(4, seed=seed) for seed in range(gm.world_size())]
        with gm.typed() as types:
            if gm.rank() == 1:
                print("loss", (w * 3).sum().item(), end="")
            chosen = experts[gm.rank()]
            y = w + 1 if gm.rank() == 0 else w + 2
            return [types.of(one)["world"] for one in (w, chosen, y, experts[0], w * 5)], kinds(types)

    reported, found = everywhere(threads(3)(body))
    assert reported == [gm.I, gm.V, gm.V, gm.R, gm.I]
    assert not found


def test_in_place_and_view_writes_set_the_type_of_the_written_value(threads: Ranks) -> None:
    def body() -> list[object]:
        with gm.typed() as types:
            same, first, whole, through = (torch.zeros(4) for _ in range(4))
            seen = same * 1
            same.add_(own(4))
            first[0] = own(1)[0]
            view = whole.view(2, 2)
            whole.add_(own(4))
            through.data.copy_(own(4))
            filled = own(4)
            filled.zero_()
            return [types.of(one)["world"] for one in (seen, same, first, view, through, filled)]

    assert everywhere(threads(2)(body)) == [gm.R, gm.V, gm.V, gm.V, gm.V, gm.R]


def test_random_numbers_have_the_type_of_their_generator(threads: Ranks) -> None:
    def body() -> list[object]:
        alike = torch.Generator().manual_seed(5)
        apart = torch.Generator().manual_seed(gm.rank())
        with gm.typed() as types:
            made = [torch.rand(3, generator=alike), torch.rand(3, generator=apart)]
            made += [torch.zeros(3).normal_(generator=apart)]
            return [types.of(one)["world"] for one in made]

    assert everywhere(threads(2)(body)) == [gm.R, gm.V, gm.V]


def test_verb_raises_for_a_wrong_type(threads: Ranks) -> None:
    def summed_again() -> None:
        gm.all_reduce(drawn(3).requires_grad_() * 2, dst=gm.I)

    def averaged_again() -> None:
        gm.all_reduce(drawn(3).requires_grad_() * 2, op="mean", dst=gm.I)

    def not_the_same() -> None:
        gm.shard(own(4).requires_grad_() * 1, src=gm.I)

    def replicated_twice() -> None:
        gm.replicate(gm.all_gather(own(2).requires_grad_()))

    def gathered_partial() -> None:
        gm.all_gather(gm.convert(own(2), src=gm.V, dst=gm.P))

    def own_losses_behind_i() -> None:
        y = gm.all_gather(own(2).requires_grad_(), dst=gm.I)
        ((1 + gm.rank()) * y).sum().backward()

    def one_loss_behind_r() -> None:
        (gm.all_gather(own(2).requires_grad_()) ** 2).sum().backward()

    wrong = {
        summed_again: "summed-again",
        averaged_again: "averaged-again",
        not_the_same: "not-the-same",
        replicated_twice: "operand-type",
        gathered_partial: "operand-type",
        own_losses_behind_i: "gradient-differs",
        one_loss_behind_r: "sum-too-many",
    }

    def body(program: Callable[[], None], strict: bool) -> Any:
        try:
            with gm.typed(strict=strict) as types:
                program()
        except gm.TypeMismatchError as error:
            return str(error)
        return [(finding.kind, finding.file == __file__) for finding in types.findings]

    for program, kind in wrong.items():
        assert everywhere(threads(2)(body, program, False)) == [(kind, True)], program
        assert kind in everywhere(threads(2)(body, program, True))


def test_right_programs_have_no_findings(threads: Ranks) -> None:
    def tensor_parallel() -> None:
        w1, w2 = own(3, 4).requires_grad_(), own(4, 3, seed=1).requires_grad_()
        bias, x = drawn(3).requires_grad_(), drawn(5, 3)
        y = gm.all_reduce(torch.tanh(gm.replicate(x) @ w1) @ w2, dst=gm.I) + bias
        y.square().mean().backward()

    def data_parallel() -> None:
        w = drawn(3).requires_grad_()
        loss = (gm.replicate(w) * own(3)).square().sum()
        gm.objective(loss).backward()

    def contrastive() -> None:
        w = drawn(3, 4).requires_grad_()
        mine = own(2, 3) @ gm.replicate(w)
        every = gm.all_gather(mine)
        (mine @ every.T).logsumexp(1).mean().backward()

    def shared_energy() -> None:
        x = own(3).requires_grad_()
        y = gm.convert(gm.all_gather(x), src=gm.R, dst=gm.I)
        y.square().sum().backward()

    def one_loss_declared() -> None:
        y = gm.all_gather(own(3).requires_grad_())
        gm.objective(y.square().sum(), loss_type=gm.R).backward()

    def sequence_parallel() -> None:
        scale = drawn(4).requires_grad_()
        x = gm.shard(drawn(6, 4).requires_grad_(), dim=0, src=gm.I)
        normed = torch.nn.functional.layer_norm(x, (4,), gm.replicate(scale))
        whole = gm.all_gather(normed, dst=gm.I)
        whole.square().sum().backward()

    def row_parallel_bias() -> None:
        part, bias = own(3).requires_grad_(), drawn(3).requires_grad_()
        once = gm.convert(bias, src=gm.I, dst=gm.P)
        gm.all_reduce(gm.convert(part * 2, src=gm.V, dst=gm.P) + once, dst=gm.I).square().sum().backward()

    def steps_and_counts() -> None:
        w = nn.Parameter(drawn(4, 3))
        v = nn.Parameter(own(3, 4))
        step = torch.optim.AdamW([w, v])
        for _ in range(3):
            count = gm.all_reduce(torch.tensor(2.0 + gm.rank()), dst=gm.R)
            y = gm.all_reduce(gm.replicate(drawn(5, 4) @ w / count) @ v, dst=gm.I)
            step.zero_grad()
            (y.square().sum() / count).backward()
            step.step()

    def body(program: Callable[[], None]) -> list[str]:
        with gm.typed(strict=True) as types:
            program()
        return types.notes

    programs = (
        tensor_parallel,
        data_parallel,
        contrastive,
        shared_energy,
        one_loss_declared,
        sequence_parallel,
        row_parallel_bias,
        steps_and_counts,
    )
    for program in programs:
        assert threads(2)(body, program) == [[], []], program


def test_a_missing_sum_is_named_with_its_line_and_the_collective(threads: Ranks) -> None:
    def body() -> list[tuple[str, str, bool]]:
        w = drawn(4).requires_grad_()
        with gm.typed() as types:
            x = gm.reduce_scatter(own(8))
            parted = w * x
            (gm.all_reduce(parted, dst=gm.R) * own(4)).sum().backward()
        return [(one.kind, one.op, "all_reduce" in one.began) for one in types.findings]

    assert everywhere(threads(2)(body)) == [("missing-sum", "aten.mul", True)]


def test_a_parameter_that_one_rank_has_freed_is_not_accused(threads: Ranks) -> None:
    def trained() -> nn.Module:
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
        model(own(4, 3)).square().mean().backward()
        return model

    def body() -> list[str]:
        with gm.typed() as types:
            model = trained()
            if gm.rank() == 0:
                del model
                gc.collect()  # the wrapper has circles of references
            gm.all_reduce(torch.ones(1), dst=gm.R)
        return kinds(types)

    assert threads(2)(body) == [[], []]


@pytest.mark.parametrize("dst", [gm.I, gm.R])
def test_assigned_data_sets_the_type_of_a_parameter(threads: Ranks, dst: Any) -> None:
    def body() -> tuple[object, object, list[str]]:
        w = nn.Parameter(own(3))
        with gm.typed() as types:
            before = types.of(w)["world"]
            w.data = gm.all_reduce(w.data, op="mean", dst=dst)
            after = types.of(w)["world"]
            for _ in range(2):
                w.grad = None
                (gm.replicate(w) * own(3, seed=1)).square().sum().backward()
                assert w.grad is not None
                w.data = w.data - 0.1 * w.grad
            w.data = own(3, seed=2)
            gm.all_reduce(gm.replicate(w), dst=gm.I)
        return before, after, kinds(types)

    assert everywhere(threads(2)(body)) == (gm.V, gm.I, ["not-the-same"])


INFINITE = {
    "masked_fill": lambda p, mask: p.masked_fill(mask, -torch.inf),
    "where": lambda p, mask: torch.where(mask, -torch.inf, p),
    "a bias": lambda p, mask: p + torch.zeros(3, 3).masked_fill(mask, -torch.inf),
    "added in place": lambda p, mask: torch.zeros(3, 3).masked_fill(mask, -torch.inf).add_(p),
    "rows": lambda p, mask: p.clone().index_fill_(0, torch.tensor([1]), -torch.inf),
    "a view": lambda p, mask: _written(p.clone(), slice(1, 3), -torch.inf),
    "a buffer": lambda p, mask: _written(torch.full((4, 3), -torch.inf), slice(3), p),
}
FINITE = {
    "masked_fill": lambda p, mask: p.masked_fill(mask, -5.0),
    "a bias": lambda p, mask: p + torch.ones(3, 3).masked_fill(mask, -torch.inf),
    "a view": lambda p, mask: _written(p.clone(), slice(1, 3), -5.0),
    "a buffer": lambda p, mask: _written(torch.full((4, 3), -5.0), slice(3), p),
}


def _written(x: torch.Tensor, rows: slice, value: torch.Tensor | float) -> torch.Tensor:
    x[rows] = value
    return x


@pytest.mark.parametrize(
    ("how", "found"),
    [*((one, []) for one in INFINITE.values()), *((one, ["counts-many-times"]) for one in FINITE.values())],
)
def test_minus_infinity_in_a_pending_sum_counts_once(
    threads: Ranks, how: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], found: list[str]
) -> None:
    def body() -> list[str]:
        mask = torch.ones(3, 3, dtype=torch.bool).triu(1)
        with gm.typed() as types:
            pending = gm.assert_type(own(3, 3), gm.P)
            gm.all_reduce(how(pending, mask), dst=gm.R).softmax(-1)
        return kinds(types)

    assert everywhere(threads(2)(body)) == found


def test_an_optimizers_steps_are_looked_at_before_the_gradients_are_gone(threads: Ranks) -> None:
    def body(summed: bool) -> tuple[list[str], object]:
        torch.manual_seed(0)
        w = nn.Parameter(drawn(3))
        with gm.typed() as types:
            step = torch.optim.AdamW([w])
            for _ in range(2):
                loss = ((gm.replicate(w) if summed else w) * own(3)).square().sum()
                step.zero_grad()
                loss.backward()
                step.step()
            step.zero_grad()
            return kinds(types), types.of(w)["world"]

    assert everywhere(threads(2)(body, True)) == ([], gm.I)
    found = threads(2)(lambda: [finding.kind for finding in _unsummed().findings])
    assert everywhere(found) == ["missing-sum"]


def _unsummed() -> gm.Types:
    w = nn.Parameter(drawn(3))
    with gm.typed() as types:
        step = torch.optim.SGD([w], lr=0.1)
        (w * own(3)).square().sum().backward()
        step.step()
        step.zero_grad()
    return types


def test_equal_entries_may_be_a_chance_and_are_a_note_until_declared(threads: Ranks) -> None:
    def body(declared: bool) -> tuple[list[str], int]:
        bias = torch.zeros(4, requires_grad=True)
        with gm.typed() as types:
            if declared:
                gm.assert_type(bias, gm.I)
            (bias + own(4)).square().sum().backward()
        return kinds(types), len(types.notes)

    assert everywhere(threads(2)(body, False)) == ([], 1)
    assert everywhere(threads(2)(body, True)) == (["declared-gradient", "missing-sum"], 0)


def test_assert_type_compares_bits_and_types(threads: Ranks) -> None:
    def outside(kind: gm.Type, varies: bool) -> str:
        x = own(3) if varies else drawn(3)
        try:
            return "same" if gm.assert_type(x, {"tp": kind}) is x else "another"
        except gm.TypeMismatchError as error:
            return str(error).splitlines()[0]

    def on_mesh(*args: Any) -> str:
        with gm.use_mesh(gm.mesh(tp=2)):
            return outside(*args)

    for kind in (gm.R, gm.I):
        assert threads(2)(on_mesh, kind, False) == ["same", "same"]
        assert "declared as" in everywhere(threads(2)(on_mesh, kind, True))
    for kind in (gm.V, gm.P):
        assert threads(2)(on_mesh, kind, True) == ["same", "same"]

    def inside() -> tuple[list[str], list[object]]:
        with gm.typed() as types:
            gm.assert_type(drawn(3).requires_grad_() * 2, gm.P)
            p = gm.assert_type(own(3), gm.P)
            r = gm.assert_type(drawn(3) * 2, gm.R)
            reported = [types.of(one)["world"] for one in (p, p * 2, r, r * p)]
        return kinds(types), reported

    assert everywhere(threads(2)(inside)) == (["declared-otherwise"], [gm.P, gm.P, gm.R, gm.P])

    def wrong() -> str:
        try:
            gm.assert_type(drawn(3), {None: "R"})  # type: ignore[dict-item]
        except (gm.ArgumentError, gm.MismatchError) as error:
            return type(error).__name__
        return ""

    assert set(threads(2)(wrong)) <= {"ArgumentError", "MismatchError"}


def test_each_mesh_axis_has_a_separate_type(threads: Ranks) -> None:
    def body() -> list[object]:
        with gm.use_mesh(gm.mesh(dp=2, tp=2)):
            dp, tp = gm.rank("dp"), gm.rank("tp")
            w = drawn(4, seed=tp).requires_grad_()
            x = drawn(4, seed=10 + dp)
            with gm.typed() as types:
                y = w * x
                total = gm.all_reduce(y, "tp", dst=gm.I)
                everything = gm.all_reduce(total, "dp", dst=gm.R)
                world = torch.distributed.group.WORLD
                assert world is not None
                both = gm.all_reduce(y, world, dst=gm.I)
                return [types.of(one) for one in (w, x, y, total, everything, both)]

    v, r, i = gm.V, gm.R, gm.I
    assert everywhere(threads(4)(body)) == [
        {"dp": i, "tp": v},
        {"dp": v, "tp": r},
        {"dp": v, "tp": v},
        {"dp": v, "tp": i},
        {"dp": r, "tp": i},
        {"dp": i, "tp": i},
    ]


def test_stages_with_different_programs_are_v_over_their_axis(threads: Ranks) -> None:
    def body() -> tuple[object, object, list[str]]:
        with gm.use_mesh(gm.mesh(pp=2, dp=2)):
            stage = gm.rank("pp")
            w = drawn(4 + stage, 4, seed=stage).requires_grad_()
            with gm.typed() as types:
                y = gm.replicate(w, "dp") @ drawn(4, seed=gm.rank("dp"))
                y = y.tanh() if stage else y.exp()
                y.sum().backward()
                reported = types.of(w), types.of(y)
        return *reported, kinds(types)

    assert everywhere(threads(4)(body)) == ({"pp": gm.V, "dp": gm.I}, {"pp": gm.V, "dp": gm.V}, [])


def test_ranks_that_part_get_an_error_and_do_not_hang(threads: Ranks) -> None:
    def body() -> str:
        try:
            with gm.typed():
                if gm.rank() == 0:
                    gm.all_reduce(own(3), dst=gm.R)
        except gm.MismatchError as error:
            return str(error)
        return ""

    assert all("different calls" in one for one in threads(2)(body))

    def left() -> str:
        try:
            with gm.typed():
                gm.all_reduce(own(3), dst=gm.R)
                raise KeyError("mine")
        except KeyError:
            return "mine"

    assert threads(2)(left) == ["mine", "mine"]
    assert threads(2)(lambda: float(gm.all_reduce(torch.ones(()), dst=gm.R))) == [2.0, 2.0]


def test_a_block_inside_of_another_is_refused_and_an_operator_without_a_rule_is_a_note(
    threads: Ranks,
) -> None:
    def nested() -> str:
        with gm.typed():
            try:
                with gm.typed():
                    pass
            except gm.ArgumentError as error:
                return str(error).splitlines()[0]
        return ""

    assert "cannot be nested" in everywhere(threads(2)(nested))

    def without() -> tuple[object, list[str], list[str]]:
        with gm.typed() as types:
            y = torch.special.chebyshev_polynomial_t(own(3).abs(), 2)
            return types.of(y * 2)["world"], types.notes, kinds(types)

    kind, notes, found = everywhere(threads(2)(without))
    assert kind is None
    assert not found
    assert "special_chebyshev_polynomial_t" in notes[0]


class _Summed(torch.autograd.Function):
    """As it stands in many repositories."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def raw_calls() -> list[object]:
    x = own(4)
    with gm.typed() as types:
        summed, parts = x.clone(), [torch.empty(4) for _ in range(gm.world_size())]
        dist.all_reduce(summed)
        dist.all_gather(parts, x)
        y = _Summed.apply(x.requires_grad_())
        return [types.of(one)["world"] for one in (summed, parts[1], y, y * 2, x)]


def ddp(wrapped: bool) -> tuple[object, int]:
    torch.manual_seed(0)
    first = nn.Linear(3, 4)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(4, 1))
    with gm.typed() as types:
        whole = nn.parallel.DistributedDataParallel(model) if wrapped else model
        step = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            step.zero_grad()
            whole(own(4, 3)).square().mean().backward()
            step.step()
        reported = types.of(first.weight)["world"]
    return reported, len(types.findings)


def test_raw_collectives_and_user_functions_keep_equal_values_on_threads(threads: Ranks) -> None:
    assert everywhere(threads(2)(raw_calls)) == [gm.R, gm.R, gm.R, gm.R, gm.V]


@pytest.mark.processes
def test_raw_collectives_and_wrappers_on_processes(processes: Ranks) -> None:
    run = processes(2)
    assert everywhere(run(raw_calls)) == [gm.R, gm.R, gm.R, gm.R, gm.V]
    assert everywhere(run(ddp, True)) == (gm.I, 0)
    kind, found = everywhere(run(ddp, False))
    assert kind is gm.V
    assert found >= 3


def test_nothing_is_traced_after_the_block(threads: Ranks) -> None:
    def body() -> tuple[bool, list[str]]:
        with gm.typed() as types:
            y = gm.all_reduce(own(2).requires_grad_(), dst=gm.R)
        y.exp().sum().backward()
        from gradmesh.runtime.state import rank_state

        return not rank_state().instruments, kinds(types)

    assert threads(2)(body) == [(True, [])] * 2
