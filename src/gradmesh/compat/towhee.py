"""Drop-in for `AllGather` of `towhee.models.drl.until_module`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradmesh.compat import _shared
from gradmesh.compat._shared import OpFunction, run
from gradmesh.errors import ArgumentError
from gradmesh.runtime.mesh import AxisLike, resolve
from gradmesh.types import I

__all__ = ["AllGather"]


class AllGather(OpFunction):
    """The ranks' tensors concatenated along dim 0; backward returns this rank's slice of the gradient.

    ::

        V -> I    shape (n, ...) -> (W n, ...)   x0 -> [x0 x1]      g0[0] <- [g0[0] g0[1]]
                                                 x1 -> [x0 x1]      g1[1] <- [g1[0] g1[1]]

    That gradient is complete if every rank computes the same loss from the result, as the original expects. If the
    losses differ, use `gradmesh.all_gather(x)`, whose backward sums over the ranks.

    Call `AllGather.apply(tensor, args)` or `AllGather.apply(tensor, args, axis)`; arguments and errors are those of
    `forward`. Scalars are stacked.

    Example:
        >>> def on_each_rank():
        ...     x = torch.tensor([1.0 + gm.axis().rank], requires_grad=True)
        ...     y = AllGather.apply(x, SimpleNamespace(world_size=2, local_rank=0))
        ...     (y * torch.tensor([3.0, 4.0])).sum().backward()
        ...     return y.tolist(), x.grad.tolist()
        >>> import torch, gradmesh as gm
        >>> from types import SimpleNamespace
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [([1.0, 2.0], [3.0]), ([1.0, 2.0], [4.0])]
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, args: Any, axis: AxisLike = None) -> Tensor:
        """Gather, and save the op on `ctx`.

        Args:
            ctx: any object, or None if `backward` is not called directly.
            tensor: this rank's tensor, of the same shape on all ranks.
            args: any object with the number of ranks as `args.world_size`; 1 returns the tensor, in any process group.
                `args.local_rank` is ignored.
            axis: the ranks to gather from; defaults to the current mesh's only axis, else the world.

        Raises:
            ArgumentError: `args.world_size` is neither 1 nor the number of ranks of the axis.
            MismatchError: the shapes or dtypes differ (detected on some backends).
        """
        world_size = getattr(args, "world_size", None)
        alone = world_size == 1
        found = _shared.single_rank_axis("one rank") if alone else resolve(axis, "compat.towhee.AllGather")
        if world_size != found.size:
            raise ArgumentError.of(
                "args.world_size differs from the axis size",
                op="compat.towhee.AllGather",
                axis=str(found),
                expected=f"args.world_size={found.size}",
                got=f"args.world_size={world_size!r}",
                remedy=f"set args.world_size={found.size}, or pass the axis: AllGather.apply(x, args, axis)",
            )
        if tensor.dim() == 0:
            tensor = tensor.unsqueeze(0)
        op = _shared.all_gather(tensor, found, dst=I)
        return run(ctx, op, tensor, others=1 if axis is None else 2)
