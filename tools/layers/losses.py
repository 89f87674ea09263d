"""Contrastive losses, dense ones of a few lines beside those of gradmesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid, mse_loss, relu

import gradmesh as gm
from tools.layers.case import Case, Lie


def clip(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
    """Cross entropy of each pair against all others, in both directions."""
    logits, places = s * x @ y.T, torch.arange(len(x))
    return (cross_entropy(logits, places) + cross_entropy(logits.T, places)) / 2


def siglip(x: Tensor, y: Tensor, s: Tensor, b: Tensor) -> Tensor:
    """A yes or no for each of all pairs."""
    signs = 2 * torch.eye(len(x), dtype=x.dtype) - 1
    return -logsigmoid(signs * (s * x @ y.T + b)).sum() / len(x)


def nt_xent(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
    """Cross entropy of each view against all others, of both kinds."""
    z, n = torch.cat([x, y]), len(x)
    logits = (z @ z.T / s).masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf)
    return cross_entropy(logits, torch.arange(2 * n).roll(n))


def sup_con(x: Tensor, y: Tensor, s: Tensor, labels: Tensor) -> Tensor:
    """The same, where all views of a label are right."""
    z, each = torch.stack([x, y], 1).flatten(0, 1), labels.repeat_interleave(2)
    logits, own = z @ z.T / s, torch.eye(len(z), dtype=torch.bool)
    alike = (each[:, None] == each) & ~own
    log_p = logits - logits.masked_fill(own, -torch.inf).logsumexp(1, keepdim=True)
    return -(log_p.masked_fill(~alike, 0).sum(1) / alike.sum(1)).mean()


def vic_reg(x: Tensor, y: Tensor) -> Tensor:
    """Distance of the views, spread and covariance of the features."""
    loss = 25 * mse_loss(x, y)
    for z in (x, y):
        c = (z - z.mean(0)).T @ (z - z.mean(0)) / (len(z) - 1)
        loss = loss + 25 * relu(1 - (z.var(0) + 1e-4).sqrt()).mean() / 2
        loss = loss + (c - c.diag().diag()).square().sum() / z.shape[1]
    return loss


def barlow_twins(x: Tensor, y: Tensor) -> Tensor:
    """How far the correlation of the views' features is from the identity."""
    u, v = ((z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-5).sqrt() for z in (x, y))
    c, on = u.T @ v / len(x), torch.eye(x.shape[1], dtype=torch.bool)
    return (1 - c[on]).square().sum() + 0.0051 * c[~on].square().sum()


def _case(
    name: str,
    dense: Callable[..., Tensor],
    ours: Callable[..., Tensor],
    numbers: int = 0,
    *,
    wide: bool = False,
) -> Case:
    """A loss of two views of the samples, and of numbers that every rank has."""

    def shapes(n: int, s: int) -> list[tuple[int, ...]]:
        # Wide features would make the covariances large, and not the samples.
        return [(n, 4 * s)] * 2 + [()] * numbers

    def parts(_: Sequence[torch.Size], sizes: tuple[int, ...]) -> Callable[..., Tensor]:
        return partial(ours, sizes=sizes)

    lies: tuple[Lie, ...] = (0, 0, *[gm.R] * numbers)
    return Case(name, "V -> I", shapes, lies, dense, parts, gm.I, large=(16384, 16) if wide else (8192, 32))


def _temperature(s: Tensor) -> Tensor:
    """A number above 0 of any: the draws have both signs."""
    return 1 + s**2


def _ring(x: Tensor, y: Tensor, s: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return gm.nn.clip_loss(x, y, s, sizes=sizes, gather="ring")


CASES = [
    _case("clip_loss", clip, gm.nn.clip_loss, 1),
    _case("clip_loss, ring", clip, _ring, 1),
    _case("siglip_loss", siglip, gm.nn.siglip_loss, 2),
    _case(
        "nt_xent_loss",
        lambda x, y, s: nt_xent(x, y, _temperature(s)),
        lambda x, y, s, sizes: gm.nn.nt_xent_loss(x, y, _temperature(s), sizes=sizes),
        1,
    ),
    _case(
        "sup_con_loss",
        lambda x, y, s: sup_con(x, y, _temperature(s), torch.arange(len(x)) % 2),
        lambda x, y, s, sizes: gm.nn.sup_con_loss(
            torch.stack([x, y], 1),
            (torch.arange(sum(sizes)) % 2)[gm.axis().slice(sizes)],
            _temperature(s),
            sizes=sizes,
        ),
        1,
    ),
    _case("vic_reg_loss", vic_reg, gm.nn.vic_reg_loss, wide=True),
    _case("barlow_twins_loss", barlow_twins, gm.nn.barlow_twins_loss, wide=True),
]
