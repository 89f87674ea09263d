"""Attention over a sharded sequence equals that of one process, in every derivative, and rejects bad input."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import gradmesh as gm
from gradmesh.nn import attention
from gradmesh.verify import Audit, Link, delayed
from tests.attention_programs import Program, attend_densely, attend_on_ranks, compare, on_rank
from tests.seldom import seldom

Ranks = Callable[[int], Callable[..., list[Any]]]

BY = pytest.mark.parametrize("by", ["ring", "heads"])
VERBS: dict[str, Any] = {"ring": gm.nn.ring_attention, "heads": gm.nn.ulysses_attention}


def parts(program: Program) -> list[Tensor]:
    return [program.part(x, gm.rank()).clone() for x in program.whole]


def furthest(found: list[Tensor], program: Program, expected: list[Tensor]) -> float:
    """How far this rank's results are from its parts of the expected ones."""
    wanted = [program.part(x, gm.rank()) for x in expected]
    far = [(f - w).detach().abs().max().item() for f, w in zip(found, wanted, strict=True) if f.numel()]
    return max(far, default=0.0)


# ---- proofs


@BY
@pytest.mark.parametrize(
    "program",
    [
        Program(sizes=(3, 2)),
        Program(sizes=(0, 4), causal=True),
        Program(sizes=(4, 3), causal=True, order="zigzag", heads=4, groups=1),
        Program(sizes=(2, 5), causal=True, lengths=(3, 4)),
        Program(sizes=(3, 3), batch=2, lengths=((2, 4), (5,))),
    ],
    ids=str,
)
def test_the_gradients_of_gradients_and_forward_mode_are_right(program: Program, by: str) -> None:
    program = replace(program, by=by)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((1 + gm.rank()) * attend_on_ranks(program, q, k, v)).sin().sum()

    inputs = [tuple(program.part(x, rank) for x in program.whole) for rank in range(2)]
    assert gm.verify.gradcheck(loss, inputs, world_size=2, order=2, forward=True).ok


@BY
@pytest.mark.parametrize("kind", seldom(["group", "parts"], ["parts"]))
def test_an_audit_finds_nothing(by: str, kind: str) -> None:
    def build(group: Any, counts: list[int]) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(torch.distributed.get_rank(group))
        shape = 1, 2, counts[torch.distributed.get_rank(group)], 4
        operands = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
        call = VERBS[by]
        return lambda q, k, v: call(q, k, v, group, causal=True, sizes="auto"), tuple(operands)

    found: Audit
    if kind == "group":
        found = gm.verify.audit(
            lambda group=None: build(group, [3] * torch.distributed.get_world_size(group))
        )
    else:
        found = gm.verify.audit(lambda parts=None: build(None, parts or [3, 3]), world_size=2)
    assert found.ok, found
    assert "V -> V" in found.arrows


class Block(torch.nn.Module):
    """Grouped attention with projections, over whatever part of the sequence it is given."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        self.q, self.kv, self.out = (torch.nn.Linear(8, n) for n in (8, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 2)).unbind(2)
        seen = VERBS[self.by](q, k.transpose(1, 2), v.transpose(1, 2), causal=True, sizes="auto")
        return x + self.out(seen.transpose(1, 2).flatten(2))


@BY
def test_training_follows_the_single_process(by: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    shard = gm.verify.Shard

    def loss(model: torch.nn.Module, x: Tensor) -> Tensor:
        return (model(x).sin() ** 2).sum()

    model = lambda: torch.nn.Sequential(Block(by), Block(by))
    assert gm.verify.same_as_single(loss, inputs=(shard(x, dim=1),), module=model, world_size=3, steps=3).ok


# ---- modes of derivatives


@BY
@pytest.mark.parametrize("causal", [False, True])
def test_transforms_are_those_of_one_process(by: str, causal: bool, threads: Ranks) -> None:
    program = Program(by=by, sizes=(3, 0, 2), causal=causal)
    along = replace(program, seed=1).whole

    def on_each_rank() -> list[float]:
        here, there = parts(program), [program.part(x, gm.rank()) for x in along]
        mine = lambda *x: attend_on_ranks(program, *x)
        dense = lambda *x: attend_densely(program, *x)
        tangents = torch.func.jvp(mine, tuple(here), tuple(there))
        expected = torch.func.jvp(dense, tuple(program.whole), tuple(along))
        several = torch.vmap(mine)(*(torch.stack((x, 2 * x)) for x in here))
        slopes = torch.func.grad(lambda *x: mine(*x).sin().sum(), (0, 1, 2))(*here)
        expected_slopes = torch.func.grad(lambda *x: dense(*x).sin().sum(), (0, 1, 2))(*program.whole)
        twice = [dense(*(2 * x for x in program.whole))]
        return [
            furthest(list(tangents), program, list(expected)),
            furthest([several[0]], program, [expected[0]]),
            furthest([several[1]], program, twice),
            furthest(list(slopes), program, list(expected_slopes)),
        ]

    assert max(max(far) for far in threads(3)(on_each_rank)) < 1e-12


@BY
def test_batched_gradients_are_those_one_by_one(by: str, threads: Ranks) -> None:
    program = Program(by=by, sizes=(3, 2), causal=True)

    def on_each_rank() -> float:
        leaves = [x.requires_grad_() for x in parts(program)]
        out = attend_on_ranks(program, *leaves)
        seeds = [torch.full_like(out, 1.0 + gm.rank()), out.detach().cos()]
        several = torch.autograd.grad(
            out, leaves, torch.stack(seeds), is_grads_batched=True, retain_graph=True
        )
        alone = [torch.autograd.grad(out, leaves, seed, retain_graph=True) for seed in seeds]
        return max(
            float((several[leaf][one] - alone[one][leaf]).abs().max()) for one in (0, 1) for leaf in range(3)
        )

    assert max(threads(2)(on_each_rank)) < 1e-12


@BY
def test_one_result_is_deterministic_forward_and_backward(by: str, threads: Ranks) -> None:
    program = Program(by=by, sizes=(40, 40), heads=4, groups=2, causal=True, dtype=torch.float32, orders=1)
    first, *others = (threads(2)(on_rank, program) for _ in range(3))
    for other in others:
        for mine, again in zip(first, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))


@BY
@pytest.mark.parametrize("ordered", [False, True])
def test_a_checkpoint_computes_it_again(by: str, ordered: bool, threads: Ranks) -> None:
    program = Program(by=by, sizes=(3, 2), causal=True)

    def on_each_rank() -> float:
        leaves = [x.requires_grad_() for x in parts(program)]
        again = lambda *x: attend_on_ranks(program, *x).sin()
        if ordered:
            with gm.ordered():
                out = checkpoint(again, *leaves, use_reentrant=False)
                gm.backward(out.square().sum() if gm.rank() else None)
        else:
            checkpoint(again, *leaves, use_reentrant=False).square().sum().backward()
        whole = [x.requires_grad_() for x in program.whole]
        squares = attend_densely(program, *whole).sin().square()
        (squares[:, :, 3:] if ordered else squares).sum().backward()
        return furthest([x.grad for x in leaves], program, [x.grad for x in whole])

    assert max(threads(2)(on_each_rank)) < 1e-12


def compiled_on_rank(by: str, backend: str) -> float:
    program = Program(by=by, sizes=(4, 4), heads=4, causal=True, order="zigzag")
    leaves = [x.requires_grad_() for x in parts(program)]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return VERBS[by](1.5 * q, k, v, causal=True, order="zigzag").sin()

    def both(function: Callable[..., Tensor]) -> list[Tensor]:
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad((1 + gm.rank()) * out.square().sum(), leaves)]

    made = both(torch.compile(run, fullgraph=True, backend=backend))
    return max(float((a - b).abs().max()) for a, b in zip(made, both(run), strict=True))


@pytest.mark.slow
@BY
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_program_is_the_same(by: str, backend: str, processes: Ranks) -> None:
    assert max(processes(2)(compiled_on_rank, by, backend)) < 1e-12


def test_on_processes_it_is_that_of_one_process(processes: Ranks) -> None:
    for by in VERBS:
        for program in (
            Program(by=by, sizes=(4, 3), causal=True, order="zigzag", heads=6, groups=2),
            Program(by=by, sizes=(0, 5), lengths=(2, 3), ordered=True, idle=1),
        ):
            compare(program, processes(2)(on_rank, program))


# ---- which ranks take part


@BY
def test_a_rank_of_which_nothing_requires_grad_takes_part(by: str, threads: Ranks) -> None:
    program = Program(by=by, sizes=(3, 3, 3), causal=True, orders=1)
    for frozen in range(3):
        compare(replace(program, frozen=frozen), threads(3)(on_rank, replace(program, frozen=frozen)))


def refused_on_all(run: Callable[..., list[Any]], *job: Any) -> str:
    """The text of an error that every rank has, the library's own on each."""

    def on_each_rank() -> str:
        with pytest.raises(gm.GradmeshError) as caught:
            job[0](*job[1:])
        return str(caught.value)

    return "\n".join(run(on_each_rank))


@BY
def test_ranks_that_use_different_results_are_refused(by: str, threads: Ranks) -> None:
    program = Program(by=by)

    def differing() -> None:
        q, k, v = (x.requires_grad_() for x in parts(program))
        one, other = attend_on_ranks(program, q, k, v), attend_on_ranks(program, k, q, v)
        (one if gm.rank() else other).sum().backward()

    said = refused_on_all(threads(2), differing)
    assert said.count("the backward of the same call on every rank") == 2
    assert "run forward and backward inside `with gradmesh.ordered():`" in said


@BY
def test_no_grad_on_one_rank_is_refused(by: str, threads: Ranks) -> None:
    program = Program(by=by)

    def differing() -> None:
        leaves = [x.requires_grad_() for x in parts(program)]
        with torch.set_grad_enabled(gm.rank() == 1):
            attend_on_ranks(program, *leaves)

    assert "gradients recorded on every rank, or on no rank" in refused_on_all(threads(2), differing)


WRONG: dict[str, tuple[Callable[[list[Tensor]], list[Tensor]], dict[str, Any], str]] = {
    "dimensions": (lambda x: [x[0][0], *x[1:]], {}, "4 dimensions"),
    "heads": (
        lambda x: [x[0], x[1].repeat(1, 3, 1, 1), x[2].repeat(1, 3, 1, 1)],
        {},
        "heads of q a multiple of that of k",
    ),
    "keys": (lambda x: [x[0], x[1][:, :, :1], x[2]], {}, "k and v of equal heads and length"),
    "dtype": (lambda x: [x[0].float(), *x[1:]], {}, "the same floating-point dtype"),
    "whole numbers": (lambda x: [y.long() for y in x], {}, "the same floating-point dtype"),
    "rows": (
        lambda x: [x[0][:, :, :1], *x[1:]],
        {"causal": True},
        "causal= and lengths= need as many queries as keys",
    ),
    "order": (lambda x: x, {"order": "spiral"}, "'plain', 'zigzag'"),
    "causal": (lambda x: x, {"causal": 1}, "causal must be a bool"),
    "scale": (lambda x: x, {"scale": "1"}, "scale must be a float or None"),
    "sizes": (lambda x: x, {"sizes": (1, 5)}, "sizes does not match this rank's number of keys"),
    "lengths": (lambda x: x, {"lengths": (2, 2)}, "add up to 6"),
    "lengths of each": (lambda x: x, {"lengths": ((2, 2), (6,))}, "1 lists"),
    "fractional lengths": (lambda x: x, {"lengths": (2.5, 3.5)}, "add up to 6"),
    "mask": (lambda x: x, {"attn_mask": torch.ones(3, 6)}, "ulysses_attention"),
    "dropout": (lambda x: x, {"dropout_p": 0.1}, "dropout of attention weights is not supported"),
}


@BY
@pytest.mark.parametrize("name", WRONG)
def test_invalid_arguments_raise_on_every_rank(by: str, name: str, threads: Ranks) -> None:
    change, options, text = WRONG[name]
    program = Program(by=by)

    def call(wrong: bool) -> None:
        operands = parts(program)
        VERBS[by](*(change(operands) if wrong else operands), **(options if wrong else {}))

    assert refused_on_all(threads(2), call, True).count(text) >= 2
    one_alone = refused_on_all(threads(2), lambda: call(gm.rank() == 1))
    assert text in one_alone
    assert "rank 1" in one_alone
    compare(program, threads(2)(on_rank, program))  # the next call is right


@BY
def test_sizes_that_are_not_zigzag_raise_with_the_zigzag_sizes(by: str, threads: Ranks) -> None:
    program = Program(by=by, sizes=(1, 5))
    options = {"order": "zigzag", "sizes": (1, 5)}
    text = refused_on_all(threads(2), lambda: VERBS[by](*parts(program), **options))
    assert text.count("expected  sizes (3, 3)") == 2


@BY
@pytest.mark.parametrize("options", [{"causal": True}, {"scale": 2.0}, {"lengths": (4, 2)}], ids=str)
def test_arguments_that_differ_between_ranks_are_named(
    by: str, options: dict[str, Any], threads: Ranks
) -> None:
    program = Program(by=by)
    text = refused_on_all(threads(2), lambda: VERBS[by](*parts(program), **(options if gm.rank() else {})))
    assert text.count("the ranks' calls do not match") == 2
    assert next(iter(options)) + "=" in text


def test_a_custom_attention_cannot_be_combined_with_lengths(threads: Ranks) -> None:
    program = Program()

    def call() -> None:
        VERBS["heads"](*parts(program), lengths=(3, 3), attention=scaled_dot_product_attention)

    assert "cannot be combined with lengths=" in refused_on_all(threads(2), call)


# ---- values


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (6, 2), (5, 5)])
def test_an_attention_that_is_given_sees_the_whole_sequence(heads: tuple[int, int], threads: Ranks) -> None:
    program = Program(
        by="heads", sizes=(3, 3, 2), heads=heads[0], groups=heads[1], causal=True, order="zigzag"
    )

    def on_each_rank() -> float:
        leaves = [x.requires_grad_() for x in parts(program)]
        seen = VERBS["heads"](
            *leaves,
            causal=True,
            order="zigzag",
            sizes=program.sizes,
            scale=0.3,
            attention=scaled_dot_product_attention,
        )
        seen.square().sum().backward()
        whole = [x.requires_grad_() for x in program.whole]
        dense = attend_densely(program, whole[0] * 0.6, *whole[1:])
        dense.square().sum().backward()
        return furthest([seen, *(x.grad for x in leaves)], program, [dense, *(x.grad for x in whole)])  # type: ignore[list-item]

    assert max(threads(3)(on_each_rank)) < 1e-12


@BY
def test_rows_need_not_be_as_many_as_keys(by: str, threads: Ranks) -> None:
    program = Program(by=by, sizes=(2, 5))

    def on_each_rank() -> float:
        _, k, v = (x.requires_grad_() for x in parts(program))
        whole_k, whole_v = (x.requires_grad_() for x in program.whole[1:])
        rows = torch.randn(1, 2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        mine = slice(4 * gm.rank(), 4 * gm.rank() + 4)
        seen = VERBS[by](rows[:, :, mine], k, v, sizes=program.sizes)
        (seen**2).sum().backward()
        dense = (rows @ whole_k.mT / 2).softmax(-1) @ whole_v
        (dense**2).sum().backward()
        near = float((seen - dense[:, :, mine]).detach().abs().max())
        return max(near, furthest([k.grad, v.grad], program, [whole_k.grad, whole_v.grad]))  # type: ignore[list-item]

    assert max(threads(2)(on_each_rank)) < 1e-12


def test_uneven_numbers_of_queries_by_heads_are_passed_or_refused_by_name(threads: Ranks) -> None:
    program = Program(by="heads", sizes=(3, 5))

    def on_each_rank(query_sizes: Any) -> float | str:
        _, k, v = parts(program)
        whole = torch.randn(1, 2, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        q = whole[:, :, gm.axis().slice((3, 4))]  # on rank 0 as many as keys, by chance
        if query_sizes is None:
            with pytest.raises(gm.MismatchError) as error:
                gm.nn.ulysses_attention(q, k, v, sizes=program.sizes)
            return str(error.value)
        seen = gm.nn.ulysses_attention(q, k, v, sizes=program.sizes, query_sizes=query_sizes)
        dense = (q @ program.whole[1].mT / 2).softmax(-1) @ program.whole[2]
        return float((seen - dense).abs().max())

    for query_sizes in ((3, 4), "auto"):
        assert max(threads(2)(on_each_rank, query_sizes)) < 1e-12
    for text in threads(2)(on_each_rank, None):
        assert "query_sizes=(3, 5)" in text
        assert "query_sizes=(4, 4)" in text


def test_query_sizes_that_are_not_this_ranks_are_refused(threads: Ranks) -> None:
    def on_each_rank() -> str:
        x = torch.ones(1, 2, 3, 4)
        with pytest.raises(gm.ShapeError) as error:
            gm.nn.ulysses_attention(x, x, x, query_sizes=(2, 4))
        return str(error.value)

    for text in threads(2)(on_each_rank):
        assert "query_sizes does not match this rank's number of queries" in text


@BY
def test_operands_of_any_strides_are_taken(by: str, threads: Ranks) -> None:
    def on_each_rank() -> float:
        one = torch.tensor(1.0 + gm.rank(), dtype=torch.float64, requires_grad=True)
        base = torch.arange(24.0, dtype=torch.float64).view(1, 3, 2, 4).transpose(1, 2) / 24
        q, k, v = one.expand(1, 2, 3, 4), base, torch.cat((base, base), -1)[..., ::2]
        seen = VERBS[by](q, k, v)
        seen.sum().backward()  # an expanded gradient
        leaf = torch.full((1, 2, 3, 4), 1.0 + gm.rank(), dtype=torch.float64, requires_grad=True)
        again = VERBS[by](leaf, k.contiguous(), v.contiguous())
        again.backward(torch.ones(1, 2, 3, 4, dtype=torch.float64))
        return max(float((seen - again).detach().abs().max()), float((one.grad - leaf.grad.sum()).abs()))  # type: ignore[union-attr,operator]

    assert max(threads(2)(on_each_rank)) < 1e-13


@pytest.mark.parametrize("causal", [False, True])
def test_without_the_fused_kernels_it_is_the_same(
    causal: bool, threads: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(sizes=(600, 70), heads=2, groups=1, causal=causal, orders=1)
    fused = threads(2)(on_rank, program)
    monkeypatch.setattr(attention, "fused_attention", lambda *_: None)
    for mine, plain in zip(fused, threads(2)(on_rank, program), strict=True):
        assert not all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))
        assert max(float((a - b).abs().max()) for a, b in zip(mine, plain, strict=True)) < 1e-12


def test_large_scores_do_not_overflow(threads: Ranks) -> None:
    program = Program(sizes=(3, 3, 3), causal=True)

    def on_each_rank() -> bool:
        q, k, v = parts(program)
        leaf = (1e4 * q).requires_grad_()
        seen = gm.nn.ring_attention(leaf, k, v, causal=True)
        seen.sum().backward()
        whole = attend_densely(program, 1e4 * program.whole[0], *program.whole[1:])
        finite = bool(leaf.grad.isfinite().all())  # type: ignore[union-attr]
        return finite and furthest([seen], program, [whole]) < 1e-10

    assert all(threads(3)(on_each_rank))


@BY
def test_bfloat16_is_summed_in_float32(by: str, threads: Ranks) -> None:
    """No further from the exact result than torch's own attention on the whole sequence, within a rounding."""
    program = Program(by=by, sizes=(64,) * 4, heads=4, groups=4, features=(16, 16), dtype=torch.bfloat16)
    q, k, v = program.whole
    exact = attend_densely(program, q.double(), k.double(), v.double())
    own = float((scaled_dot_product_attention(q, k, v) - exact).abs().max())

    def on_each_rank() -> float:
        return furthest([attend_on_ranks(program, *parts(program))], program, [exact])

    assert max(threads(4)(on_each_rank)) < own + float(exact.abs().max()) * 2**-8


# ---- what is kept, and when it travels


@pytest.mark.parametrize("causal", [False, True])
def test_a_rank_keeps_its_part_alone_for_backward(causal: bool, threads: Ranks) -> None:
    def on_each_rank(size: int) -> int:
        program = Program(sizes=(24 // size,) * size, causal=causal, dtype=torch.float32)
        leaves = [x.requires_grad_() for x in parts(program)]
        kept: list[int] = []

        def pack(x: Tensor) -> Tensor:
            kept.append(x.nbytes)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            seen = VERBS["ring"](*leaves, causal=causal)
        assert seen.requires_grad
        return sum(kept)

    each = {size: threads(size)(on_each_rank, size)[0] - 4 for size in (1, 2, 3, 4)}  # without the token
    assert each[1] == 24 * 2 * (4 * 4 + 1) * 4  # q, k, v, the result and its logsumexp
    assert all(size * kept == each[1] for size, kept in each.items())


@pytest.mark.timed
def test_blocks_travel_while_others_are_attended_to(threads: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both halves take less than work and calls in turn, by at least half of what can be hidden."""
    work, wire, ranks = 0.03, 0.02, 3
    attend, slope = attention._attend, attention.BlockwiseGradients._of

    def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any) -> Any:
            time.sleep(work)
            return function(*args)

        return slow

    monkeypatch.setattr(attention, "_attend", slowly(attend))
    monkeypatch.setattr(attention.BlockwiseGradients, "_of", slowly(slope))
    program = Program(sizes=(2,) * ranks)

    def on_each_rank() -> tuple[float, float]:
        leaves = [x.requires_grad_() for x in parts(program)]
        with delayed(Link(1e6 * wire, 100)):
            gm.barrier()
            started = time.perf_counter()
            seen = VERBS["ring"](*leaves)
            between = time.perf_counter()
            seen.sum().backward()
            return between - started, time.perf_counter() - between

    # The best of four, as other tests run beside it.
    steps = [[max(times) for times in zip(*threads(ranks)(on_each_rank), strict=True)] for _ in range(4)]
    forward, backward = (min(times) for times in zip(*steps, strict=True))
    hidden = (ranks - 1) * wire
    assert ranks * work < forward < ranks * work + hidden - hidden / 2
    in_turn = ranks * work + (2 * ranks - 1) * wire
    assert ranks * work < backward < in_turn - hidden / 2


@pytest.mark.parametrize("size", [2, 4])
def test_keys_go_round_once_forward_and_with_their_gradients_once_back(size: int) -> None:
    def on_each_rank() -> None:
        program = Program(sizes=(3,) * size, groups=1, dtype=torch.bfloat16)
        VERBS["ring"](*(x.requires_grad_() for x in parts(program))).sum().backward()

    block = 3 * (4 + 4) * 2  # keys and values of one head, 2 bytes each
    events = gm.verify.simulate(on_each_rank, size).events
    for rank in range(size):
        forward, back = (events.select(rank=rank, phase=phase) for phase in ("forward", "backward"))
        assert [event.sent for event in forward] == [block] * (size - 1)
        # Gradients travel in float32, once more, since they come home.
        assert sorted(event.sent for event in back) == [block] * (size - 1) + [2 * block] * size
        assert {event.origin for event in back} == {forward[0].number}


def test_fully_masked_blocks_are_not_computed(threads: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """In zigzag order each rank has the same work; in plain order the last one has the most."""
    scores: dict[int, int] = {}
    attend = attention._attend

    def counting(q: Tensor, k: Tensor, *rest: Any) -> Any:
        scores[gm.rank()] = scores.get(gm.rank(), 0) + q.shape[2] * k.shape[2] // (2 if rest[1] else 1)
        return attend(q, k, *rest)

    monkeypatch.setattr(attention, "_attend", counting)
    found = {}
    for order in ("plain", "zigzag"):
        scores.clear()
        threads(4)(lambda: VERBS["ring"](*parts(Program(sizes=(8,) * 4)), causal=True, order=order))  # noqa: B023
        found[order] = [scores[rank] for rank in range(4)]
    assert found["plain"] == [32, 96, 160, 224]
    assert found["zigzag"] == [128, 128, 128, 128]
    assert sum(found["plain"]) == math.comb(32, 2) + 16


# ---- the sequence


@pytest.mark.parametrize("length", [0, 1, 5, 12])
@pytest.mark.parametrize("order", ["plain", "zigzag"])
def test_a_sequence_is_cut_and_put_together_again(length: int, order: Any, threads: Ranks) -> None:
    def on_each_rank() -> bool:
        x = torch.arange(2.0 * length, dtype=torch.float64).view(length, 2).requires_grad_()
        part = gm.nn.sequence.shard(x, dim=0, order=order, src=gm.R)
        places = gm.nn.sequence.positions(length, order=order)
        whole = gm.nn.sequence.unshard(part, dim=0, order=order)
        ((1 + gm.rank()) * whole**2).sum().backward()
        mine = torch.zeros_like(x)
        mine[places] = 6 * 2 * x.detach()[places]  # the sum of the ranks' weights; elsewhere another rank's
        return (
            torch.equal(part, x[places])
            and torch.equal(whole, x)
            and torch.equal(x.grad, mine)  # type: ignore[arg-type]
            and gm.nn.sequence.sizes(length, order=order)[gm.rank()] == len(places)
        )

    assert all(threads(3)(on_each_rank))


def test_parts_that_are_in_no_zigzag_order_are_refused(threads: Ranks) -> None:
    assert "sizes of a zigzag sequence" in refused_on_all(
        threads(2), lambda: gm.nn.sequence.unshard(torch.zeros(1 + 3 * gm.rank(), 1), dim=0, order="zigzag")
    )
    assert "unknown order" in refused_on_all(threads(2), lambda: gm.nn.sequence.sizes(4, order="spiral"))  # type: ignore[arg-type]
