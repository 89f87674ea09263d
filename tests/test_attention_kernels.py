"""The fused kernels that attention uses on each device; those of CUDA by stand-ins with torch's signatures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradmesh._torch import operators
from gradmesh._torch.operators import FusedAttention, fused_attention
from tests import attention_kernels
from tests.attention_kernels import NAMES, called
from tests.attention_programs import Program, compare, on_rank

pytestmark = pytest.mark.device
Ranks = Callable[[int], Callable[..., list[Any]]]

ON_CUDA = dict(zip(NAMES, operators.KERNELS["cuda"], strict=True))


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """`only(name)`: CPU tensors use that kernel of CUDA's and no other, by its stand-in."""

    def use(name: str) -> None:
        kernel = ON_CUDA[name]
        monkeypatch.setattr(kernel, "_able", lambda *_: True)
        monkeypatch.setitem(operators.KERNELS, "cpu", [kernel])

    with attention_kernels.installed():
        yield use


PROGRAMS = {
    "plain": Program(sizes=(5, 35), orders=1),
    "causal, zigzag, grouped": Program(
        sizes=(36, 36), order="zigzag", causal=True, heads=4, groups=2, batch=2, orders=1
    ),
    "documents": Program(sizes=(40, 7), causal=True, lengths=(30, 17), orders=1),
    "heads": Program(by="heads", sizes=(3, 4), causal=True, orders=1),
    "second derivative": Program(sizes=(3, 34), causal=True),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=[*PROGRAMS])
def test_cuda_kernels_get_their_arguments_in_order_and_derivatives_are_those_of_one_process(
    name: str, program: Program, only: Callable[[str], None], threads: Ranks
) -> None:
    only(name)
    compare(program, threads(2)(on_rank, program))
    assert called[name] >= 2
    backward = called.pop(f"{name}_backward", 0)
    assert backward >= 2 if program.orders == 1 else backward == 0  # a differentiable backward has no kernel
    assert set(called) == {name}


@pytest.mark.parametrize("name", NAMES)
def test_torch_has_the_operators_of_cuda_with_these_arguments(name: str) -> None:
    x = torch.empty(2, 3, 40, 16, device="meta", dtype=torch.bfloat16)
    kernel = ON_CUDA[name]
    assert kernel._lse_dim in (3, 4)
    out, lse = kernel.forward(x, x[:, :1], x[:, :1], True, 0.5)
    assert (out.shape, lse.shape) == (x.shape, x.shape[:3])
    dq, dk, dv = kernel.backward(out, x, x[:, :1], x[:, :1], out, lse, diagonal=True, scale=0.5)
    assert (dq.shape, dk.shape, dv.shape) == (x.shape, *2 * [(2, 1, 40, 16)])


def test_kernel_whose_arguments_torch_names_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1, 1, 2, 8)
    assert FusedAttention("flash_attention_for_cpu", lambda *_: True).takes(x, x, x, False)
    for part in ("_forward", "_backward"):
        for other in (torch.ops.aten.add.Tensor, None):
            changed = FusedAttention("flash_attention_for_cpu", lambda *_: True)
            monkeypatch.setattr(changed, part, other)
            assert not changed.takes(x, x, x, False), (part, other)


def asked(q: Tensor, k: Tensor, v: Tensor) -> list[Any]:
    """What torch is asked for a kernel of CUDA's, and whether in grad mode."""
    found: list[Any] = []

    def query(params: Any) -> bool:
        found.append((torch.is_grad_enabled(), params))
        return True

    assert operators._on_cuda(query)(q, k, v, True) is bool(found)
    return found


def test_torch_is_asked_whether_it_has_the_kernel_forward_and_backward() -> None:
    q, k = torch.ones(2, 4, 6, 16, dtype=torch.bfloat16), torch.ones(2, 1, 6, 16, dtype=torch.bfloat16)
    with torch.no_grad():
        ((enabled, params),) = asked(q, k, k)
    assert enabled
    assert params.query.requires_grad
    assert [x.shape for x in (params.query, params.key, params.value)] == 3 * [q.shape]
    assert (params.attn_mask, params.dropout, params.is_causal, params.enable_gqa) == (None, 0.0, True, False)


@pytest.mark.parametrize("features", [(12, 16), (16, 12)])
def test_features_that_are_no_multiple_of_eight_have_no_kernel_on_cuda(features: tuple[int, int]) -> None:
    q, v = (torch.ones(2, 1, 6, size, dtype=torch.bfloat16) for size in features)
    assert asked(q, q, v) == []


@pytest.mark.parametrize("name", NAMES)
def test_where_torch_has_no_cuda_its_queries_say_so(name: str) -> None:
    if torch.version.cuda is not None:
        pytest.skip("torch is built with CUDA, and some versions ask the driver")
    x = torch.ones(1, 2, 8, 16, dtype=torch.bfloat16)
    assert not ON_CUDA[name].takes(x, x, x, False)


def test_the_first_kernel_that_can_be_used_is(monkeypatch: pytest.MonkeyPatch) -> None:
    x, kernels = torch.ones(1, 1, 2, 8), operators.KERNELS["cuda"]
    monkeypatch.setitem(operators.KERNELS, "cpu", kernels)
    for kernel in kernels:
        monkeypatch.setattr(kernel, "_able", lambda *_: False)
    assert fused_attention(x, x, x, False) is None
    for kernel in reversed(kernels):
        monkeypatch.setattr(kernel, "_able", lambda *_: True)
        assert fused_attention(x, x, x, False) is kernel


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch's own, in the first backward
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("flash_attention", SDPBackend.FLASH_ATTENTION),
        ("efficient_attention", SDPBackend.EFFICIENT_ATTENTION),
        ("cudnn_attention", SDPBackend.CUDNN_ATTENTION),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_on_a_gpu_agree_with_float64(
    name: str, backend: SDPBackend, dtype: torch.dtype, causal: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(2, n, 72, 64, generator=generator, dtype=torch.float64) for n in (4, 1, 1, 4))
    q, k, v, grad = (x.cuda() for x in drawn)
    with sdpa_kernel(backend):
        q, k, v, grad = (x.to(dtype) for x in (q, k, v, grad))
        kernel = fused_attention(q, k, v, causal)
        if kernel is None:
            pytest.skip(f"torch has no {name} for {dtype} here")
        assert kernel is ON_CUDA[name]
        out, lse = kernel.forward(q, k, v, causal, 0.2)
        dq, dk, dv = kernel.backward(grad, q, k, v, out, lse, diagonal=causal, scale=0.2)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT * 0.2
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    whole = scores.softmax(-1) @ leaves[2]
    expected = [whole, scores.logsumexp(-1), *torch.autograd.grad(whole, leaves, grad.double())]
    close = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-3}[dtype]
    for got, right in zip((out, lse, dq, dk, dv), (x.detach() for x in expected), strict=True):
        assert float((got.double() - right).abs().max()) <= close * float(right.abs().max())
