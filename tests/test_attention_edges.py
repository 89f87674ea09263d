"""Attention where little is usual: a scale that is not positive, and autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import gradmesh as gm

ATTENTIONS = [gm.nn.ring_attention, gm.nn.ulysses_attention]
Attend = Callable[..., Tensor]


def _part(features: int = 3, seed: int = 0) -> Tensor:
    numbers = torch.Generator().manual_seed(10 * gm.rank() + seed)
    return torch.randn(1, 1, 6, features, generator=numbers)


@pytest.mark.parametrize("scale", [-2.0, 0.0])
@pytest.mark.parametrize("attend", ATTENTIONS)
def test_a_scale_that_is_not_positive_may_be_causal(attend: Attend, scale: float) -> None:
    def on_each_rank() -> None:
        q, k = _part().requires_grad_(), _part(seed=1).requires_grad_()
        (attend(q, k, k, causal=True, scale=scale).square().sum() * (1 + gm.rank())).backward()
        whole, keys = (gm.all_gather(x.detach(), dim=2).double().requires_grad_() for x in (q, k))
        later = torch.ones(12, 12, dtype=torch.bool).triu(1)
        weights = (whole @ keys.mT * scale).masked_fill(later, -torch.inf).softmax(-1)
        (
            (weights @ keys).square().sum((0, 1, 3)) @ torch.tensor([1.0, 2.0]).repeat_interleave(6).double()
        ).backward()
        here = gm.axis().slice(12)
        for part, x in ((q, whole), (k, keys)):
            assert part.grad is not None
            assert x.grad is not None
            torch.testing.assert_close(part.grad.double(), x.grad[:, :, here], rtol=1e-4, atol=1e-4)

    gm.launch(on_each_rank, 2, backend="threads")


def test_custom_attention_receives_a_scale_of_zero() -> None:
    def on_each_rank() -> None:
        x = _part()
        found = gm.nn.ulysses_attention(x, x, x, scale=0.0, attention=scaled_dot_product_attention)
        torch.testing.assert_close(found, gm.nn.ring_attention(x, x, x, scale=0.0))

    gm.launch(on_each_rank, 2, backend="threads")


@pytest.mark.parametrize("features", [3, 5], ids=["fused", "tiles"])
@pytest.mark.parametrize("attend", ATTENTIONS)
def test_it_is_that_of_float32_under_autocast(attend: Attend, features: int) -> None:
    def step(v: Tensor, autocast: bool) -> Any:
        q = _part().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found = attend(q, q, v)
            found.square().sum().backward()
        return found, q.grad

    def on_each_rank() -> None:
        v = _part(features, 2)
        torch.testing.assert_close(step(v, True), step(v, False), rtol=0, atol=0)

    gm.launch(on_each_rank, 2, backend="threads")
