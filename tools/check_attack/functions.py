"""The hand-written operations over ranks that scripts bring along, in the styles in which people write them."""

from __future__ import annotations

import re
from textwrap import dedent

_HELPERS = {
    "plain": """
        def summed(x, group):
            x = x.contiguous().clone()
            dist.all_reduce(x, group=group)
            return x


        def gathered(x, dim, group):
            x = x.contiguous()
            parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, x, group=group)
            return torch.cat(parts, dim)


        def own_part(x, dim, group):
            return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


        def sum_then_own_part(x, dim, group):
            return own_part(summed(x, group), dim, group)
        """,
    "tensors": """
        def summed(x, group):
            x = x.contiguous().clone()
            work = dist.all_reduce(x, op=dist.ReduceOp.SUM, group=group, async_op=True)
            work.wait()
            return x


        def gathered(x, dim, group):
            x = x.transpose(0, dim).contiguous()
            out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
            dist.all_gather_into_tensor(out, x, group=group)
            return out.transpose(0, dim).contiguous()


        def own_part(x, dim, group):
            size = x.shape[dim] // dist.get_world_size(group)
            return x.narrow(dim, dist.get_rank(group) * size, size).clone()


        def sum_then_own_part(x, dim, group):
            x = x.transpose(0, dim).contiguous()
            out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
            dist.reduce_scatter_tensor(out, x, group=group)
            return out.transpose(0, dim).contiguous()
        """,
    "functional": """
        def summed(x, group):
            return funcol.wait_tensor(funcol.all_reduce(x.contiguous(), "sum", group))


        def gathered(x, dim, group):
            return funcol.wait_tensor(funcol.all_gather_tensor(x.contiguous(), dim, group))


        def own_part(x, dim, group):
            return torch.tensor_split(x, dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


        def sum_then_own_part(x, dim, group):
            return funcol.wait_tensor(funcol.reduce_scatter_tensor(x.contiguous(), "sum", dim, group))
        """,
}
STYLES = tuple(_HELPERS)

_ALONG_A_DIM = """
        class {}(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, dim, group):
                ctx.dim, ctx.group = dim, group
                return {}(x, dim, group)

            @staticmethod
            def backward(ctx, grad):
                return {}(grad, ctx.dim, ctx.group), None, None
        """
_MAPS = {
    "GatherWhole": ("gathered", "own_part"),
    "GatherParts": ("gathered", "sum_then_own_part"),
    "Scatter": ("own_part", "gathered"),
    "ReduceScatter": ("sum_then_own_part", "gathered"),
}
"""Functions along a dimension: what they are forward and backward."""

_FUNCTIONS = {
    "Copy": """
        class Copy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, group):
                ctx.group = group
                return x.view_as(x)

            @staticmethod
            def backward(ctx, grad):
                return summed(grad, ctx.group), None
        """,
    "Reduce": """
        class Reduce(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, group):
                return summed(x, group)

            @staticmethod
            def backward(ctx, grad):
                return grad, None
        """,
    **{name: _ALONG_A_DIM.format(name, *maps) for name, maps in _MAPS.items()},
    "Exchange": """
        class Exchange(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, group):
                ctx.group = group
                out = torch.empty_like(x.contiguous())
                dist.all_to_all_single(out, x.contiguous(), group=group)
                return out

            @staticmethod
            def backward(ctx, grad):
                out = torch.empty_like(grad.contiguous())
                dist.all_to_all_single(out, grad.contiguous(), group=ctx.group)
                return out, None
        """,
    "Relu": """
        class Relu(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                out = x.clamp(min=0)
                ctx.save_for_backward(out)
                return out

            @staticmethod
            def backward(ctx, grad):
                (out,) = ctx.saved_tensors
                return grad * (out > 0)
        """,
    "copy_by_hook": """
        def copy_by_hook(x, group):
            x = x.view_as(x)
            if x.requires_grad:
                x.register_hook(lambda grad: summed(grad, group))
            return x
        """,
    "reduce_in_place": """
        def reduce_in_place(x, group):
            dist.all_reduce(x, group=group)
            return x
        """,
}

CALLS = {
    "copy": ("Copy.apply({x}, TP)", "copy_by_hook({x}, TP)"),
    "reduce": ("Reduce.apply({x}, TP)", "reduce_in_place({x}, TP)"),
    "gather_whole": ("GatherWhole.apply({x}, {dim}, {group})",),
    "gather_parts": (
        "GatherParts.apply({x}, {dim}, {group})",
        "funcol.all_gather_tensor_autograd({x}.contiguous(), {dim}, {group})",
    ),
    "scatter": ("Scatter.apply({x}, {dim}, {group})",),
    "reduce_scatter": ("ReduceScatter.apply({x}, {dim}, {group})",),
}
"""What each operation is called by; the first is the plain one."""


def functions(text: str, style: str) -> str:
    """The definitions that a text uses, helpers first."""
    used = [
        dedent(body).strip() for name, body in _FUNCTIONS.items() if re.search(rf"\b{name}(\.apply|)\(", text)
    ]
    helped = any(name in "".join([text, *used]) for name in ("summed(", "gathered(", "own_part("))
    return "\n\n\n".join([dedent(_HELPERS[style]).strip()] * helped + used)
