"""Tensor parallel layers: equal to the dense ones in value and derivatives, and loud where they cannot be."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradmesh as gm
from gradmesh.ops.sizes import balanced
from tests.seldom import seldom
from tests.tensor_programs import Model, Program, deviation, in_parts, model_of, random_program

Run = Callable[..., list[Any]]
Threads = Callable[[int], Run]


def _worst(found: list[dict[str, float]]) -> float:
    return max(value for each in found for value in each.values())


# -- against the dense model


@pytest.mark.parametrize("seed", range(24))
def test_random_models_have_the_value_and_both_derivatives_of_the_dense_one(
    threads: Threads, seed: int
) -> None:
    ranks = random.Random(seed).choice([1, 2, 3, 4])
    assert _worst(threads(ranks)(deviation, random_program(seed, ranks))) < 1e-9


@pytest.mark.slow
def test_many_random_models_have_the_value_and_both_derivatives_of_the_dense_one(threads: Threads) -> None:
    for seed in range(100, 900):
        ranks = random.Random(seed).choice([1, 2, 3, 4])
        program = random_program(seed, ranks)
        assert _worst(threads(ranks)(deviation, program)) < 1e-9, program


@pytest.mark.processes
@pytest.mark.parametrize("sequence", [None, 0])
def test_models_on_processes_are_those_on_threads(
    processes: Callable[[int], Run], sequence: int | None
) -> None:
    assert _worst(processes(2)(deviation, Program(5, blocks=2, sequence=sequence, tied=True))) < 1e-9


def test_a_norm_that_is_not_replicated_lacks_a_sum(threads: Threads) -> None:
    def slope() -> tuple[Tensor, Tensor]:
        model, ids, _ = model_of(Program(3, sequence=0))
        made: list[Any] = [in_parts(Program(3, sequence=0), model) for _ in range(2)]
        norm = made[1].norms[0] = made[1].norms[0].module
        for each in made:
            each(ids).pow(3).sum().backward()
        return made[0].norms[0].module.weight.grad, norm.weight.grad

    for right, wrong in threads(2)(slope):
        assert (right - wrong).abs().max() > 1e-3


# -- cross entropy


def _data(
    words: int = 7, tokens: int = 6, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(tokens, 5, generator=draw, dtype=torch.float64).to(dtype)
    table = torch.randn(words, 5, generator=draw, dtype=torch.float64).to(dtype)
    return x, table, torch.randint(0, words, (tokens,), generator=draw)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ranks", [1, 3, 9])
def test_cross_entropy_is_that_of_torch(threads: Threads, ranks: int, reduction: Any) -> None:
    x, table, target = _data()
    target[2] = -1
    expected = cross_entropy(x @ table.T, target, reduction=reduction, ignore_index=-1, label_smoothing=0.2)

    def found() -> tuple[Tensor, Tensor]:
        own = gm.shard(table)
        form: dict[str, Any] = {"reduction": reduction, "ignore_index": -1, "label_smoothing": 0.2}
        return (
            gm.nn.vocab_parallel_cross_entropy(x @ own.T, target, **form),
            gm.nn.linear_cross_entropy(x, own, target, tile=4, **form),
        )

    for each in threads(ranks)(found):
        for loss in each:
            torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("ranks", [1, 3])
def test_smoothing_over_the_other_words_leaves_the_target_the_rest(threads: Threads, ranks: int) -> None:
    x, table, target = _data()
    words = len(table)
    labels = torch.full((len(x), words), 0.2 / (words - 1), dtype=x.dtype)
    labels[torch.arange(len(x)), target] = 0.8
    expected = cross_entropy(x @ table.T, labels)

    def found() -> tuple[Tensor, Tensor]:
        own = gm.shard(table)
        form: dict[str, Any] = {"label_smoothing": 0.2, "smoothing_over": "others"}
        return (
            gm.nn.vocab_parallel_cross_entropy(x @ own.T, target, **form),
            gm.nn.linear_cross_entropy(x, own, target, tile=4, **form),
        )

    for each in threads(ranks)(found):
        for loss in each:
            torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_large_logits_overflow_nowhere(threads: Threads, shift: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [-torch.inf, 3.0, 1.0], [-torch.inf, 0.0, -torch.inf]]) + shift
    target = torch.tensor([2, 1, 1])
    leaf = logits.clone().requires_grad_()
    cross_entropy(leaf, target).backward()

    def found() -> tuple[Tensor, Tensor]:
        own = gm.shard(logits, dim=1).detach().requires_grad_()
        loss = gm.nn.vocab_parallel_cross_entropy(own, target)
        loss.backward()
        assert own.grad is not None
        return loss.detach(), gm.all_gather(own.grad, dim=1, sizes="auto")

    for loss, slope in threads(3)(found):
        torch.testing.assert_close(loss, cross_entropy(logits, target))
        torch.testing.assert_close(slope, leaf.grad)


def test_half_precision_sums_in_float32(threads: Threads) -> None:
    x, table, target = _data(50, 30, torch.bfloat16)
    expected = cross_entropy((x @ table.T).float(), target)
    for loss in threads(2)(lambda: gm.nn.linear_cross_entropy(x, gm.shard(table), target, tile=7)):
        assert loss.dtype is torch.float32
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)


def test_targets_that_are_all_ignored_give_torchs_nan_and_zero_gradients_of_the_sum(threads: Threads) -> None:
    x, table, target = _data()

    def found() -> tuple[Tensor, Tensor]:
        own = gm.shard(table).requires_grad_()
        nothing = torch.full_like(target, -100)
        gm.nn.linear_cross_entropy(x, own, nothing, reduction="sum").backward()
        return gm.nn.linear_cross_entropy(x, own, nothing).detach(), own.grad

    for mean, slope in threads(2)(found):
        assert mean.isnan()
        assert not slope.any()


def test_forward_mode_and_vmap_go_through_tiles(threads: Threads) -> None:
    x, table, target = _data()

    def dense(x: Tensor) -> Tensor:
        return cross_entropy(x @ table.T, target)

    def found() -> tuple[Tensor, Tensor, Tensor]:
        sizes = balanced(len(table), gm.world_size())
        own = gm.shard(table, sizes=sizes)

        def loss(x: Tensor) -> Tensor:
            return gm.nn.linear_cross_entropy(x, own, target, sizes=sizes, tile=2)

        return torch.func.jvp(loss, (x,), (x.sin(),))[1], torch.func.vmap(loss)(torch.stack((x, -x))), loss(x)

    for slope, both, _ in threads(2)(found):
        torch.testing.assert_close(slope, torch.func.jvp(dense, (x,), (x.sin(),))[1])
        torch.testing.assert_close(both, torch.stack((dense(x), dense(-x))))


def test_logits_are_never_more_than_a_tile() -> None:
    """What autograd keeps is far less than a number for each token and word."""
    words, tokens, kept = 400, 300, dict[int, Tensor]()

    def found() -> None:
        x, table, target = _data(words, tokens)
        table.requires_grad_()

        def keep(each: Tensor) -> Tensor:
            kept[each.data_ptr()] = each  # which is so not given back, and its address not taken again
            return each

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
            gm.nn.linear_cross_entropy(x, table, target, tile=10).backward()

    gm.launch(found, 1, backend="threads")
    assert kept
    assert sum(each.numel() for each in kept.values()) < words * tokens / 10


# -- compiled, audited, checked


def _compiled(sequence: int | None) -> float:
    program = Program(2, sequence=sequence, length=4, vocabulary=8)
    dense, ids, target = model_of(program)
    model = in_parts(program, dense)
    for each in model.modules():
        if hasattr(each, "rows"):
            each.rows = None  # type: ignore[assignment]  # equal parts: nothing is asked
    sizes = (4, 4)

    def loss(ids: Tensor, target: Tensor) -> Tensor:
        x = model(ids)
        if sequence is not None:
            x = gm.all_gather(x, dim=sequence)
        head: Any = model.head
        return gm.nn.linear_cross_entropy(
            x,
            head.weight,
            target,
            bias=head.bias,
            src=gm.I if sequence is None else gm.R,
            sizes=sizes,
            tile=3,
        )

    eager = torch.autograd.grad(loss(ids, target), list(model.parameters()))
    whole = torch.compile(loss, fullgraph=True, backend="aot_eager")
    compiled = torch.autograd.grad(whole(ids, target), list(model.parameters()))
    return max(float((a - b).abs().max()) for a, b in zip(eager, compiled, strict=True))


@pytest.mark.processes
@pytest.mark.parametrize("sequence", seldom([None, 0], [0]))
def test_a_model_compiles_whole(worlds: Callable[..., Any], sequence: int | None) -> None:
    assert max(worlds(2, "shm", 240).run(_compiled, sequence)) < 1e-12


LAYERS: dict[str, Callable[[], tuple[Callable[[Tensor], Tensor], Tensor]]] = {
    "column": lambda: (gm.nn.ColumnParallelLinear(3, 5, dtype=torch.float64), torch.ones(4, 3)),
    "column, rows": lambda: (
        gm.nn.ColumnParallelLinear(3, 5, sequence_dim=0, dtype=torch.float64),
        torch.ones(2, 3),
    ),
    "row": lambda: (
        gm.nn.RowParallelLinear(6, 5, dtype=torch.float64),
        torch.ones(4, 3),
    ),
    "row, rows": lambda: (
        gm.nn.RowParallelLinear(6, 5, sequence_dim=0, dtype=torch.float64),
        torch.ones(4, 3),
    ),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_an_audit_of_a_layer_finds_nothing(layer: str) -> None:
    def build() -> tuple[Callable[[Tensor], Tensor], Tensor]:
        fn, x = LAYERS[layer]()
        return fn, x.double().requires_grad_()

    assert not gm.verify.audit(build, world_size=2).findings


def test_gradcheck_of_second_order_passes_for_a_pair_of_layers() -> None:
    def loss(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        kinds: dict[str, Any] = {"bias": False, "sequence_dim": 0, "dtype": torch.float64}
        first = gm.nn.ColumnParallelLinear(3, 4, **kinds)
        second = gm.nn.RowParallelLinear(4, 2, **kinds)
        inside = torch.func.functional_call(first, {"weight": up}, x)
        y: Tensor = torch.func.functional_call(second, {"weight": down}, torch.tanh(inside))
        return (1 + gm.rank()) * y.pow(2).sum()

    def inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        draw = torch.Generator().manual_seed(rank)
        return tuple(torch.randn(*shape, generator=draw) for shape in ((2, 3), (2, 3), (2, 2)))

    assert gm.verify.gradcheck(loss, inputs, world_size=2, order=2, forward=True)


# -- beside torch's own


def _beside_dtensor() -> tuple[list[Tensor], list[Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    draw = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    x = torch.randn(4, 3, generator=draw)
    theirs = parallelize_module(
        copy.deepcopy(net), init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    theirs(x).pow(2).sum().backward()
    ours = gm.nn.tensor_parallel(copy.deepcopy(net), {"0": "column", "2": "row"})
    ours(x).pow(2).sum().backward()
    return (
        [
            each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad
            for each in theirs.parameters()
        ],
        [each.grad for each in ours.parameters()],
    )


@pytest.mark.processes
def test_gradients_are_those_of_parallelize_module(worlds: Callable[..., Any]) -> None:
    for theirs, ours in worlds(2, "gloo", 240).run(_beside_dtensor):
        for a, b in zip(theirs, ours, strict=True):
            torch.testing.assert_close(a, b)


# -- state


def test_a_dense_state_goes_in_and_comes_out_on_any_number_of_ranks(threads: Threads) -> None:
    program = Program(1, tied=True, sequence=0, vocabulary=7)
    model, _, _ = model_of(program)
    expected = model.state_dict()

    def through() -> bool:
        other = Model(program)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        made = in_parts(program, other)
        result = gm.nn.load_dense_state_dict(made, expected)
        back = gm.nn.dense_state_dict(made)
        tied = made.head.weight is made.table.weight
        same = list(back) == list(expected) and all(torch.equal(back[name], expected[name]) for name in back)
        return tied and same and not result.missing_keys

    for ranks in (1, 2, 3):
        assert all(threads(ranks)(through))


def test_missing_and_unexpected_state_keys_are_named(threads: Threads) -> None:
    def tried() -> tuple[list[str], list[str]]:
        layer = gm.nn.ColumnParallelLinear(2, 4)
        result = gm.nn.load_dense_state_dict(
            layer, {"weight": torch.ones(4, 2), "other": torch.ones(1)}, strict=False
        )
        return result.missing_keys, result.unexpected_keys

    assert threads(2)(tried) == [(["bias"], ["other"])] * 2


def test_a_layer_copies_and_pickles_by_its_state(threads: Threads) -> None:
    def same() -> bool:
        layer = gm.nn.RowParallelLinear(4, 3)
        other = copy.deepcopy(layer)
        return torch.equal(layer(torch.ones(2, 2)), other(torch.ones(2, 2)))

    assert all(threads(2)(same))


# -- what is refused


def _refused(fn: Callable[[], object]) -> str:
    with pytest.raises(gm.GradmeshError) as error:
        fn()
    return str(error.value)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "an input of another width": (
        lambda: gm.nn.ColumnParallelLinear(3, 4)(torch.ones(2, 5)),
        "does not match the layer",
    ),
    "a whole input for a row layer": (
        lambda: gm.nn.RowParallelLinear(4, 3)(torch.ones(2, 4)),
        "split_input=True",
    ),
    "sizes with a wrong sum": (
        lambda: gm.nn.ColumnParallelLinear(3, 4, sizes=(1, 1)),
        "sizes does not match the layer",
    ),
    "a word that is none": (lambda: gm.nn.VocabParallelEmbedding(4, 2)(torch.tensor([4])), "ids from 0 to 3"),
    "a target that is none": (
        lambda: gm.nn.vocab_parallel_cross_entropy(torch.ones(1, 2), torch.tensor([4])),
        "a target is out of range",
    ),
    "targets of another shape": (
        lambda: gm.nn.vocab_parallel_cross_entropy(torch.ones(3, 2), torch.tensor([1])),
        "one id for each token",
    ),
    "a table of another width": (
        lambda: gm.nn.linear_cross_entropy(torch.ones(1, 2), torch.ones(2, 3), torch.tensor([1])),
        "do not match",
    ),
    "sizes of other tables": (
        lambda: gm.nn.vocab_parallel_cross_entropy(torch.ones(1, 2), torch.tensor([1]), sizes=(1, 1)),
        "sizes does not match the ranks' vocabulary entries",
    ),
    "a pattern that fits nothing": (
        lambda: gm.nn.tensor_parallel(nn.Sequential(nn.Linear(2, 2)), {"0": "column", "up": "row"}),
        "a pattern matches no module",
    ),
    "a layer of another kind": (
        lambda: gm.nn.tensor_parallel(nn.Sequential(nn.Linear(2, 2)), {"0": "vocab"}),
        "cannot convert",
    ),
    "a style that does not exist": (
        lambda: gm.nn.tensor_parallel(nn.Sequential(nn.Linear(2, 2)), {"0": "vocabulary"}),  # type: ignore[dict-item]
        "use a style of this list",
    ),
    "a tied table that is cut in two ways": (
        lambda: gm.nn.tensor_parallel(Model(Program(0, tied=True)), {"table": "vocab", "head": "row"}),
        "in two ways",
    ),
    "a table with max_norm": (
        lambda: gm.nn.VocabParallelEmbedding.of(nn.Embedding(4, 2, max_norm=1.0)),
        "max_norm",
    ),
    "a part in the place of a whole state": (
        lambda: gm.nn.load_dense_state_dict(gm.nn.ColumnParallelLinear(3, 4), {"weight": torch.ones(2, 3)}),
        "does not have the dense layer's size",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_arguments_raise_on_every_rank(threads: Threads, what: str) -> None:
    fn, words = WRONG[what]
    for text in threads(2)(_refused, fn):
        assert words in text


def test_a_rank_that_alone_is_wrong_takes_no_other_with_it_into_a_wait(threads: Threads) -> None:
    def tried() -> str:
        layer = gm.nn.RowParallelLinear(4, 3)
        return _refused(lambda: layer(torch.ones(2, 2 + gm.rank())))

    first, second = threads(2)(tried)
    assert "does not match the layer" in second
    assert "rank 1" in first
