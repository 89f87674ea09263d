"""Contrastive losses where little is usual: autocast, values that are not finite, labels on one rank, many tiles."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from benchmarks.peak import peak, peak_is_told
from gradmesh.nn.contrastive.table import EXP_BOTH, log_sums

Loss = Callable[[Tensor, Tensor], Tensor]


def _embeddings() -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(gm.rank())
    return torch.randn(5, 16, generator=numbers), torch.randn(5, 16, generator=numbers)


@pytest.mark.parametrize("loss", [gm.nn.vic_reg_loss, gm.nn.barlow_twins_loss])
def test_moments_are_those_of_float32_under_autocast(loss: Loss) -> None:
    def on_each_rank() -> None:
        x, y = _embeddings()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = loss(x, y)
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, loss(x, y), rtol=0, atol=0)

    gm.launch(on_each_rank, 2, backend="threads")


def test_a_compiled_loss_is_that_of_float32_under_autocast() -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return gm.nn.clip_loss(x, y, 3.0, sizes=None)

    def on_each_rank() -> None:
        x, y = _embeddings()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = torch.compile(loss, backend="eager", fullgraph=True)(x, y)
        torch.testing.assert_close(found, loss(x, y))

    gm.launch(on_each_rank, 1, backend="threads")


def test_an_embedding_that_is_nan_is_seen_in_the_loss_though_its_label_is_alone() -> None:
    def on_each_rank() -> float:
        x, labels = _embeddings()[0], torch.tensor([0, 1, 0, 1, 2 + gm.rank()])
        if gm.rank():
            x[4] = torch.nan
        return gm.nn.sup_con_loss(x, labels, 1.0).item()

    assert all(math.isnan(value) for value in gm.launch(on_each_rank, 2, backend="threads"))


@pytest.mark.parametrize("gather", ["all", "ring"])
def test_labels_on_one_rank_raise_with_explicit_sizes(gather: str) -> None:
    def on_each_rank() -> None:
        labels = torch.arange(5) if gm.rank() else None
        with pytest.raises(gm.MismatchError):
            gm.nn.sup_con_loss(_embeddings()[0], labels, sizes=None, gather=gather)  # type: ignore[arg-type]

    gm.launch(on_each_rank, 2, backend="threads")


@pytest.mark.skipif(not peak_is_told(), reason="the system does not tell a process its largest size")
def test_memory_does_not_grow_with_the_number_of_tiles() -> None:
    numbers, tile = torch.Generator().manual_seed(0), 512
    rows, cols = torch.randn(4096, 4, generator=numbers), torch.randn(8192, 4, generator=numbers)

    def run() -> object:
        with torch.no_grad():
            return log_sums(EXP_BOTH, (rows,), (cols,), tile, columns=True)

    run()
    assert peak(run) < 24 * 4 * tile * tile  # of 128 tiles


SCALED: dict[str, Callable[[Tensor, Tensor, float | Tensor], Tensor]] = {
    "scale": gm.nn.clip_loss,
    "scale ": gm.nn.siglip_loss,
    "temperature": gm.nn.nt_xent_loss,
    "temperature ": lambda x, y, t: gm.nn.sup_con_loss(torch.stack([x, y], 1), temperature=t),
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("learned", [False, True])
def test_a_scale_that_differs_between_ranks_is_named_on_every_rank(name: str, learned: bool) -> None:
    def on_each_rank(of_ranks: tuple[float, float]) -> str:
        x, y = _embeddings()
        value = of_ranks[gm.rank()]
        try:
            loss = SCALED[name](x, y, torch.tensor(value, requires_grad=True) if learned else value)
        except gm.MismatchError as error:
            return str(error)
        return "" if loss.isfinite() else "not finite"

    assert gm.launch(on_each_rank, 2, backend="threads", args=((0.5, 0.5 + 1e-6),)) == ["", ""]
    for text in gm.launch(on_each_rank, 2, backend="threads", args=((0.5, 0.6),)):
        assert f"{name.strip()} differs between the ranks" in text
        assert f"rank 1: {name.strip()}=0.6" in text


def test_products_that_would_overflow_in_float16_are_those_of_float32(
    threads: Callable[[int], Callable[..., list[list[float]]]],
) -> None:
    def losses() -> list[float]:
        x = torch.zeros(2, 4)
        x[0, 3 * gm.rank()], x[1, 1:3] = 400.0, torch.tensor([1.0 + gm.rank(), 0.5])
        y = torch.tensor([[0.0, 1.0, 0.0, 0.5], [0.0, 2.0, 0.0, 1.0]])
        found = []
        for dtype in (torch.float16, torch.float32):
            given = x.to(dtype).requires_grad_()
            loss = gm.nn.nt_xent_loss(given, y.to(dtype), 2.0, gather="ring")
            loss.backward()
            assert given.grad is not None
            found += [loss.item(), given.grad.float().norm().item()]
        return found

    for value, norm, right, right_norm in threads(2)(losses):
        assert (value, norm) == pytest.approx((right, right_norm), rel=1e-2)
