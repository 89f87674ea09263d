"""`benchmarks.originals`: the comparison before the timing fails where a loss or a Function is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import gradmesh as gm
from benchmarks import originals
from tools.contrastive import local_loss


def _siglip(left: Tensor, right: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    logits = scale * left @ gm.all_gather(right).T + bias
    own = torch.eye(len(logits) * gm.world_size(), dtype=left.dtype)[
        gm.axis().slice(len(logits) * gm.world_size())
    ]
    return binary_cross_entropy_with_logits(logits, own, reduction="sum") / len(left)


LOCAL: dict[str, originals.Loss] = {
    "clip": lambda left, right, scale, _: local_loss(left, right, scale),
    "siglip": _siglip,
}


def _wrong(kind: str, loss: originals.Loss) -> originals.Loss:
    def changed(left: Tensor, right: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        if kind == "value":
            return loss(left, right, scale, bias) * (1 + 1e-6)
        if kind == "gradient of the embeddings":
            return loss(gm.scale_gradient(left, 0.5), right, scale, bias)
        return loss(left, right, gm.scale_gradient(scale, 1.01), bias)

    return changed


def _losses() -> list[str]:
    """Which wrong losses pass."""
    passed = []
    for name, right in LOCAL.items():
        assert originals.compare_losses(name, originals.OURS[name], right, 8) < originals.TOLERANCE
        for kind in ("value", "gradient of the embeddings", "gradient of the scale"):
            try:
                originals.compare_losses(name, _wrong(kind, originals.OURS[name]), right, 8)
            except AssertionError:
                continue
            passed.append(f"{name}, {kind}")
    return passed


def test_a_loss_with_another_value_or_gradient_fails(worlds: Any) -> None:
    assert worlds(3, "gloo", 240).run(_losses) == [[]] * 3


def _verbs() -> list[str]:
    passed = []
    for name, (ours, theirs) in originals.VERBS.items():
        originals.compare_verbs(name, ours, theirs)
        try:
            originals.compare_verbs(name, lambda x, verb=ours: gm.scale_gradient(verb(x), 2.0), theirs)
        except AssertionError:
            continue
        passed.append(name)
    return passed


def test_a_function_with_another_gradient_fails(worlds: Any) -> None:
    assert worlds(2, "gloo", 240).run(_verbs) == [[]] * 2


def _originals() -> list[float]:
    return [
        originals.compare_losses(name, originals.OURS[name], theirs)
        for name, theirs in originals.originals().items()
    ]


def test_the_losses_of_open_clip_and_lightly_are_those_of_gradmesh(worlds: Any) -> None:
    pytest.importorskip("lightly")
    pytest.importorskip("open_clip")
    for found in worlds(3, "gloo", 240).run(_originals):
        assert max(found) < originals.TOLERANCE


def test_rows_have_medians_of_the_slowest_rank() -> None:
    (row,) = [row for row in originals.rows(_two_ways, 2, 3) if "slow" in row]
    assert row == "| 2 | slow | 5.00 | 2.00 | 2.50 | 1e-12 |"


def _two_ways(_: int) -> originals.Measured:
    return {("slow",): (1e-12, [[1.0, 5.0 * gm.rank(), 9.0], [2.0, 2.0, 2.0]])}
