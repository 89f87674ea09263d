"""A sharded vocabulary: accepted ids, and what raises, identically on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradmesh as gm

Threads = Callable[[int], Callable[..., list[Any]]]

X, TARGET = torch.eye(4)[:, :3], torch.tensor([0, 1, 5, 2])


def _refused(fn: Callable[[], object]) -> str:
    with pytest.raises(gm.GradmeshError) as error:
        fn()
    return str(error.value)


@pytest.mark.parametrize("padding", [0, 2, 3, 4, -1])
@pytest.mark.parametrize("sizes", [None, (0, 5), (5, 0)])
def test_a_padding_word_on_the_edge_of_a_part_has_no_gradient(
    threads: Threads, padding: int, sizes: tuple[int, int] | None
) -> None:
    dense = nn.Embedding(5, 2, padding_idx=padding)
    ids, factors = torch.tensor([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]]), torch.arange(10.0).view(2, 5, 1)
    (dense(ids) * factors).sum().backward()

    def slope() -> Tensor:
        layer = gm.nn.VocabParallelEmbedding.of(dense, sizes=sizes)
        (layer(ids) * factors).sum().backward()
        assert layer.weight.grad is not None
        return gm.all_gather(layer.weight.grad, sizes="auto")

    for got in threads(2)(slope):
        torch.testing.assert_close(got, dense.weight.grad)


def test_words_may_be_int32_and_none_at_all(threads: Threads) -> None:
    def found() -> list[bool]:
        short, layer = TARGET.int(), gm.nn.VocabParallelEmbedding(6, 3)
        weight = X[:3] + gm.rank()
        return [
            torch.equal(layer(short), layer(TARGET)),
            tuple(layer(TARGET[:0].view(0, 2)).shape) == (0, 2, 3),
            torch.equal(
                gm.nn.vocab_parallel_cross_entropy(X + gm.rank(), short),
                gm.nn.vocab_parallel_cross_entropy(X + gm.rank(), TARGET),
            ),
            torch.equal(
                gm.nn.linear_cross_entropy(X, weight, short), gm.nn.linear_cross_entropy(X, weight, TARGET)
            ),
            gm.nn.linear_cross_entropy(X[:0], weight, TARGET[:0], reduction="sum").item() == 0,
        ]

    assert threads(2)(found) == [[True] * 5] * 2


def test_words_that_differ_between_ranks_are_found_by_a_full_check(threads: Threads) -> None:
    """Each rank has the loss of its own words otherwise: nothing that travels has another shape."""

    def messages() -> list[str]:
        target = TARGET if gm.rank() else TARGET.flip(0)
        layer = gm.nn.VocabParallelEmbedding(6, 3)
        with gm.check("full"):
            return [
                _refused(lambda: gm.nn.vocab_parallel_cross_entropy(X, target)),
                _refused(lambda: gm.nn.linear_cross_entropy(X, X[:3], target)),
                _refused(lambda: layer(target)),
            ]

    for texts in threads(2)(messages):
        assert all("a gm.I operand has to be the same on every rank" in text for text in texts)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "non-numeric ids": (
        lambda: gm.nn.VocabParallelEmbedding(4, 2)(torch.tensor([0.0])),
        "got       torch.float32",
    ),
    "ids that are not there": (
        lambda: gm.nn.VocabParallelEmbedding(4, 2)(torch.tensor([1, 7])),
        "ids from 1 to 7",
    ),
    "a dim that is not there": (
        lambda: gm.nn.RowParallelLinear(4, 2, sequence_dim=5, rows="balanced")(torch.ones(2, 2)),
        "sequence_dim is out of range",
    ),
    "the width as the sequence": (
        lambda: gm.nn.ColumnParallelLinear(4, 2, sequence_dim=-1)(torch.ones(2, 4)),
        "sequence_dim before the last dim",
    ),
    "the width of vectors as the sequence": (
        lambda: gm.nn.VocabParallelEmbedding(4, 2, sequence_dim=1)(torch.tensor([1])),
        "sequence_dim before the last dim",
    ),
    "one size for all ranks": (
        lambda: gm.nn.ColumnParallelLinear(4, 2, sizes=3),  # type: ignore[arg-type]
        "sizes does not match the layer",
    ),
    "non-numeric sizes": (
        lambda: gm.nn.ColumnParallelLinear(4, 2, sizes="ab"),  # type: ignore[arg-type]
        "sizes does not match the layer",
    ),
    "one size of words": (
        lambda: gm.nn.vocab_parallel_cross_entropy(X, TARGET, sizes=5),  # type: ignore[arg-type]
        "sizes does not match the ranks' vocabulary entries",
    ),
    "non-tensor logits": (
        lambda: gm.nn.vocab_parallel_cross_entropy([1.0], TARGET),  # type: ignore[arg-type]
        "must be a dense tensor",
    ),
    "a non-tensor target": (
        lambda: gm.nn.vocab_parallel_cross_entropy(X, [0, 1, 5, 2]),  # type: ignore[arg-type]
        "one id for each token",
    ),
    "logits without a gradient": (
        lambda: gm.nn.vocab_parallel_cross_entropy(X.long(), TARGET),
        "floating-point",
    ),
    "a non-numeric smoothing": (
        lambda: gm.nn.vocab_parallel_cross_entropy(X, TARGET, label_smoothing="a"),  # type: ignore[arg-type]
        "label_smoothing is out of range",
    ),
    "a smoothing over no words": (
        lambda: gm.nn.vocab_parallel_cross_entropy(X, TARGET, smoothing_over="some"),  # type: ignore[arg-type]
        "smoothing_over must be",
    ),
    "a negative z-loss": (
        lambda: gm.nn.linear_cross_entropy(X, X[:3], TARGET, z_loss=-1.0),
        "z_loss is out of range",
    ),
    "a non-tensor state": (
        lambda: gm.nn.load_dense_state_dict(gm.nn.ColumnParallelLinear(3, 4), {"weight": 3}),
        "does not have the dense layer's size",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_arguments_raise_on_every_rank(threads: Threads, what: str) -> None:
    fn, words = WRONG[what]
    for text in threads(2)(_refused, fn):
        assert words in text


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_a_table_that_nothing_is_looked_up_in_has_a_second_derivative(
    threads: Threads, shape: tuple[int, ...]
) -> None:
    def found() -> Tensor:
        layer = gm.nn.VocabParallelEmbedding(4, 2, padding_idx=1)
        loss = layer(torch.empty(shape, dtype=torch.int64)).pow(2).sum()
        (slope,) = torch.autograd.grad(loss, layer.weight, create_graph=True)
        return torch.autograd.grad(slope.pow(2).sum() + layer.weight.sum(), layer.weight)[0]

    for slope in threads(2)(found):
        assert torch.equal(slope, torch.ones_like(slope))
