"""The pieces of models: the text of a module, and where it may stand.

Activations are rows x tokens x features. Rows are cut over the data-parallel ranks. Over the tensor-parallel ranks
they are "whole" on each, or cut along the tokens: "tokens". Where tokens are cut, gradients of what all ranks have are
parts, which `sequence_parallel` marks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import dedent

Call = Callable[..., str]


@dataclass(frozen=True)
class Piece:
    """A module that scripts are made of."""

    name: str  # of its class
    text: str  # of its class, with {copy(h)} and the like filled in by `draw`
    layouts: frozenset[str]  # where it may stand: "whole", "tokens", or both
    axis: str = ""  # which ranks it needs several of: "", "tp" or "dp"
    local: bool = True  # whether a row's result depends on that row alone
    random: bool = False  # whether it draws what a single process would not
    # whether its gradient is on purpose not its derivative, so that differences say nothing of it
    deliberate: bool = False


_BOTH = frozenset({"whole", "tokens"})
_WHOLE, _TOKENS = frozenset({"whole"}), frozenset({"tokens"})

_ALL = (
    Piece(
        "Mlp",
        """
        class Mlp(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

            def forward(self, h):
                return h + self.down(F.gelu(self.up(h)))
        """,
        _BOTH,
    ),
    Piece(
        "ScaledBack",
        """
        class ScaledBack(nn.Module):
            def __init__(self):
                super().__init__()
                self.up = nn.Linear(D, D)

            def forward(self, h):
                return h + torch.tanh(self.up(MultipliedGradient.apply(h, -0.3)))


        class MultipliedGradient(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, factor):
                ctx.factor = factor
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                return grad * ctx.factor, None
        """,
        _BOTH,
        deliberate=True,
    ),
    Piece(
        "StraightThrough",
        """
        class StraightThrough(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)

            def forward(self, h):
                return h + self.down(Sign.apply(self.up(h)))


        class Sign(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x.sign()

            @staticmethod
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                return grad * (x.abs() <= 1)
        """,
        _BOTH,
        deliberate=True,
    ),
    Piece(
        "HookedMlp",
        """
        class HookedMlp(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)

            def forward(self, h):
                inner = torch.tanh(self.up(h))
                if inner.requires_grad:
                    inner.register_hook(lambda grad: 0.4 * grad)
                return h + self.down(inner)
        """,
        _BOTH,
        deliberate=True,
    ),
    Piece(
        "InPlaceMlp",
        """
        class InPlaceMlp(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = nn.Linear(D, D, bias=False), nn.Linear(D, D)
                self.scale = nn.Parameter(torch.tensor(0.5))

            def forward(self, h):
                inner = F.relu(self.up(h), inplace=True)
                inner = self.down(inner)
                inner *= self.scale
                inner += h
                return inner
        """,
        _BOTH,
    ),
    Piece(
        "CheckpointedMlp",
        """
        class CheckpointedMlp(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Sequential(nn.Linear(D, 2 * D), nn.Tanh(), nn.Linear(2 * D, D))

            def forward(self, h):
                return h + checkpoint(self.inner, h, use_reentrant=False)
        """,
        _BOTH,
    ),
    Piece(
        "ReentrantMlp",
        """
        class ReentrantMlp(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Sequential(nn.Linear(D, D), nn.SiLU(), nn.Linear(D, D))

            def forward(self, h):
                return h + checkpoint(self.inner, h, use_reentrant=True)
        """,
        _BOTH,
    ),
    Piece(
        "Norm",
        """
        class Norm(nn.LayerNorm):
            def __init__(self):
                super().__init__(D)
        """,
        _BOTH,
    ),
    Piece(
        "RootNorm",
        """
        class RootNorm(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(D))

            def forward(self, h):
                return self.weight * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)
        """,
        _BOTH,
    ),
    Piece(
        "Affine",
        """
        class Affine(nn.Module):
            def __init__(self):
                super().__init__()
                self.gain, self.bias = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))
                self.register_buffer("sign", torch.tensor([1.0, -1.0]).repeat(D // 2))

            def forward(self, h):
                h = torch.addcmul(self.bias, h, self.gain * self.sign)
                return h.view(*h.shape[:2], 2, D // 2).transpose(2, 3).reshape(h.shape)
        """,
        _BOTH,
    ),
    Piece(
        "OwnRelu",
        """
        class OwnRelu(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(D, D) / D**0.5)

            def forward(self, h):
                return h + Relu.apply(torch.einsum("btd,de->bte", h, self.weight))
        """,
        _BOTH,
    ),
    Piece(
        "CopiedBias",
        """
        class CopiedBias(nn.Module):
            def __init__(self):
                super().__init__()
                self.bias = nn.Parameter(torch.randn(D) * 0.1)

            def forward(self, h):
                return h + {copy(self.bias)}
        """,
        _TOKENS,
        "tp",
    ),
    Piece(
        "Positions",
        """
        class Positions(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(T, D)

            def forward(self, h):
                return h + self.table(torch.arange(T))
        """,
        _WHOLE,
    ),
    Piece(
        "OwnPositions",
        """
        class OwnPositions(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(T, D)

            def forward(self, h):
                return h + self.table(torch.arange(T).chunk(TP_SIZE)[tp_rank])
        """,
        _TOKENS,
        "tp",
    ),
    Piece(
        "Attention",
        """
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

            def forward(self, h):
                q, k, v = self.qkv(h).chunk(3, -1)
                return h + self.out(F.scaled_dot_product_attention(q, k, v))
        """,
        _WHOLE,
    ),
    Piece(
        "CutMlp",
        """
        class CutMlp(nn.Module):
            def __init__(self):
                super().__init__()
                up, down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
                self.up = cut(up.weight, 0)
                self.up_bias = cut(up.bias, 0)
                self.down = cut(down.weight, 1)
                self.bias = nn.Parameter(torch.zeros(D))

            def forward(self, h):
                inner = F.gelu(F.linear({copy(h)}, self.up, self.up_bias))
                inner = F.linear(inner, self.down)
                return h + {reduce(inner)} + self.bias
        """,
        _WHOLE,
        "tp",
    ),
    Piece(
        "CutAttention",
        """
        class CutAttention(nn.Module):
            def __init__(self):
                super().__init__()
                self.q, self.k, self.v = (cut(torch.randn(D, D) / D**0.5, 0) for _ in range(3))
                self.out = cut(torch.randn(D, D) / D**0.5, 1)

            def heads(self, x):
                return x.view(*x.shape[:2], -1, 2).transpose(1, 2)

            def forward(self, h):
                x = {copy(h)}
                q, k, v = (self.heads(F.linear(x, w)) for w in (self.q, self.k, self.v))
                mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
                mixed = F.linear(mixed, self.out)
                return h + {reduce(mixed)}
        """,
        _WHOLE,
        "tp",
    ),
    Piece(
        "GatheredLinear",
        """
        class GatheredLinear(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = cut(torch.randn(D, D) / D**0.5, 0)
                self.bias = cut(torch.zeros(D), 0)

            def forward(self, h):
                part = torch.tanh(F.linear({copy(h)}, self.weight, self.bias))
                return h + {gather_whole(part, -1, TP)}
        """,
        _WHOLE,
        "tp",
    ),
    Piece(
        "ScatteredLinear",
        """
        class ScatteredLinear(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = cut(torch.randn(D, D) / D**0.5, 1)
                self.bias = nn.Parameter(torch.zeros(D))

            def forward(self, h):
                part = F.linear({scatter(h, -1, TP)}, self.weight)
                return h + torch.tanh({reduce(part)} + self.bias)
        """,
        _WHOLE,
        "tp",
    ),
    Piece(
        "TokensMlp",
        """
        class TokensMlp(nn.Module):
            def __init__(self):
                super().__init__()
                up, down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
                self.up, self.up_bias = cut(up.weight, 0), cut(up.bias, 0)
                self.down = cut(down.weight, 1)
                self.bias = nn.Parameter(torch.zeros(D))
                self.bias.sequence_parallel = True

            def forward(self, h):
                inner = {gather_parts(h, 1, TP)}
                inner = F.relu(F.linear(inner, self.up, self.up_bias))
                inner = F.linear(inner, self.down)
                return h + {reduce_scatter(inner, 1, TP)} + self.bias
        """,
        _TOKENS,
        "tp",
    ),
    Piece(
        "ContextAttention",
        """
        class ContextAttention(nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

            def forward(self, h):
                q, k, v = self.qkv(h).chunk(3, -1)
                k = {gather_parts(k, 1, TP)}
                v = {gather_parts(v, 1, TP)}
                return h + self.out(F.scaled_dot_product_attention(q, k, v))
        """,
        _TOKENS,
        "tp",
    ),
    Piece(
        "GlobalBatchNorm",
        """
        class GlobalBatchNorm(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight, self.bias = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))
                self.register_buffer("running_mean", torch.zeros(D))

            def forward(self, h):
                count = torch.tensor(float(h.shape[0] * h.shape[1]))
                dist.all_reduce(count, group=DP)
                moments = torch.cat([h.sum((0, 1)), h.square().sum((0, 1))])
                mean, square = (distnn.all_reduce(moments, group=DP) / count).chunk(2)
                with torch.no_grad():
                    self.running_mean.lerp_(mean, 0.1)
                return (h - mean) * torch.rsqrt(square - mean.square() + 1e-3) * self.weight + self.bias
        """,
        _WHOLE,
        "dp",
        local=False,
    ),
    Piece(
        "Experts",
        """
        class Experts(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate = nn.Linear(D, 1)
                every = torch.randn(4, D, D) / D**0.5
                self.weight = nn.Parameter(every.chunk(DP_SIZE)[dp_rank].clone())
                self.weight.expert = True

            def forward(self, h):
                rows = h.shape[0]
                sent = h.transpose(0, 1).reshape(T * rows, D)  # the token at place t goes to expert t
                there = Exchange.apply(sent, DP).view(DP_SIZE, T // DP_SIZE, rows, D)
                tokens = there.transpose(0, 1).reshape(T // DP_SIZE, DP_SIZE * rows, D)
                done = torch.tanh(torch.bmm(tokens, self.weight)).view(T // DP_SIZE, DP_SIZE, rows, D)
                back = Exchange.apply(done.transpose(0, 1).reshape(T * rows, D), DP)
                return h + torch.sigmoid(self.gate(h)) * back.view(T, rows, D).transpose(0, 1)
        """,
        _WHOLE,
        "dp",
        local=False,
    ),
    Piece(
        "Dropped",
        """
        class Dropped(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(D, D)

            def forward(self, h):
                return h + F.dropout(self.linear(h), 0.25)
        """,
        _WHOLE,
        random=True,
    ),
)

PIECES = {piece.name: piece for piece in _ALL}


def _checked() -> None:
    for piece in _ALL:
        assert dedent(piece.text).strip().startswith(f"class {piece.name}(")


_checked()
