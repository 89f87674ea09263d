"""Libraries for attention over a sequence that is sharded over the ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.replaced.cases import Case, Dense, World, rows
from tools.replaced.own_tests import STANDINS, Tests
from tools.replaced.repository import Repository, imported
from tools.replaced.sources import Replaced, Source

_HEADS, _FEATURES = 2, 4


def _load(root: Path) -> Any:
    sys.path.insert(0, str(STANDINS / "flash_attn"))
    return imported("ring_flash_attn")(root)


def _attention(qkv: Tensor, causal: bool = True) -> Tensor:
    """The attention of a whole sequence, (sequence, 3, heads, features)."""
    q, k, v = (x.transpose(0, 1) for x in qkv.unbind(1))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    later = torch.full(scores.shape[-2:], causal).triu(1)
    out: Tensor = (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(0, 1)
    return out


def _dense(order: str, causal: bool = True) -> Dense:
    def attend(xs: Any, world: World) -> list[Tensor]:
        at = _positions(order, world)
        whole = torch.cat(list(xs), 1)[0]
        out = _attention(whole[at.argsort()], causal)[at]
        return [part[None] for part in out.split(list(world.sizes))]

    return attend


def _positions(order: str, world: World) -> Tensor:
    """Of the ranks' rows, one rank after another."""
    whole = torch.arange(sum(world.sizes))
    if order == "plain":
        return whole
    pieces = whole.tensor_split(2 * world.size)
    return torch.cat([x for rank in range(world.size) for x in (pieces[rank], pieces[-1 - rank])])


def _bounds(world: World) -> Tensor:
    return torch.tensor([0, 1, sum(world.sizes)], dtype=torch.int32)


def _llama3(module: Any, x: Tensor, world: World) -> Tensor:
    bounds = module.llama3_flash_attn_prepare_cu_seqlens(_bounds(world), True, world.rank, world.size)
    *given, local = bounds
    found: Tensor = module.llama3_flash_attn_varlen_qkvpacked_func(
        x, *given, heads_k_stride=1, local_k_slice=local, causal=True, group=world.group
    )
    return found


def _dense_packed(xs: Any, world: World) -> list[Tensor]:
    documents = torch.cat(list(xs)).tensor_split(_bounds(world)[1:-1].long())
    return list(torch.cat([_attention(x) for x in documents]).split(list(world.sizes)))


_SCRIPTS = (
    "llama3_flash_attn_varlen_func",
    "llama3_prepare_cu_seqlens",
    "ring_flash_attn_func",
    "ring_flash_attn_varlen_func",
    "stripe_flash_attn_func",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_varlen_func",
)
_SHORTER = (
    ("[0, 120, 1248, 4232]", "[0, 16, 156, 528]"),
    ("[0, 128, 1248, 4240]", "[0, 16, 156, 528]"),
    ("seqlen = 3816", "seqlen = 528"),
    ("seqlen = 3824", "seqlen = 528"),
)
_ADAPTERS = """from .adapters import (
    substitute_hf_flash_attn,
    update_ring_flash_attn_params,
)
"""
_QKV = (3, _HEADS, _FEATURES)

RING_FLASH_ATTENTION = Repository(
    "ring-flash-attention",
    Source(
        "zhuzilin/ring-flash-attention",
        "899628238f2f5bb8c028579c89b7cd56ea451d2a",
        parts=("ring_flash_attn",),
        swaps=((_ADAPTERS, ""),),
    ),
    (
        Replaced(
            "ring_flash_attn/ring_flash_attn.py",
            "ring_flash.py",
            ("ring_flash_attn_forward", "ring_flash_attn_backward", "RingFlashAttnFunc"),
        ),
        Replaced(
            "ring_flash_attn/zigzag_ring_flash_attn.py",
            "ring_flash_zigzag.py",
            ("zigzag_ring_flash_attn_forward", "zigzag_ring_flash_attn_backward", "ZigZagRingFlashAttnFunc"),
        ),
        Replaced(
            "ring_flash_attn/llama3_flash_attn_varlen.py",
            "ring_flash_llama3.py",
            (
                "llama3_flash_attn_varlen_forward",
                "llama3_flash_attn_varlen_backward",
                "Llama3FlashAttnVarlenFunc",
            ),
        ),
    ),
    _load,
    (
        Case(
            "ring_flash_attn_qkvpacked_func",
            lambda m, x, w: m.ring_flash_attn_qkvpacked_func(x, group=w.group),
            _dense("plain", causal=False),
            rows(1, 0, *_QKV, dim=1),
        ),
        Case(
            "zigzag_ring_flash_attn_qkvpacked_func",
            lambda m, x, w: m.zigzag_ring_flash_attn_qkvpacked_func(x, causal=True, group=w.group),
            _dense("zigzag"),
            rows(1, 0, *_QKV, dim=1),
            uneven=None,
        ),
        Case(
            "llama3_flash_attn_varlen_qkvpacked_func",
            _llama3,
            _dense_packed,
            rows(0, *_QKV),
            uneven=None,
        ),
    ),
    Tests(
        ("test",),
        ranks=2,
        swaps=_SHORTER,
        standins=("cuda", "flash_attn"),
        scripts=tuple(f"test/test_{name}.py" for name in _SCRIPTS),
    ),
    left="flash-attn is replaced by plain matrix products, before and after, since its kernels need GPUs; "
    "`llama3_flash_attn_varlen_func` keeps flash-attn, which has no second derivatives. The adapters to transformers, "
    "whose release has changed, are left out. Before, sums are in single precision, the gradient of the queries is "
    "rounded to bfloat16, and `ring_flash_attn_func` with a causal mask sends different types in double precision: "
    "it is measured without. Dropout, windows and slopes raise after, except in `llama3_flash_attn_varlen_func`. The "
    "logsumexp that tests ask for is computed from gathered keys. `stripe` and the ring functions for packed sequences "
    "stay. Its tests are scripts, which pass if all differences that they print are below 0.05, on two ranks, with "
    "shorter sequences; `test_triton_kernels.py` needs GPUs.",
)

ATTENTION = (RING_FLASH_ATTENTION,)
"""Those that are compared."""
