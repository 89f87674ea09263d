"""Drop-in for `AllGather` of `towhee.models.drl.until_module`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gradmesh.axis import AxisLike, resolve
from gradmesh.collectives import all_gather
from gradmesh.compat._function import FunctionLike
from gradmesh.errors import ArgumentError, message
from gradmesh.types import I

__all__ = ["AllGather"]


class AllGather(FunctionLike):
    """The ranks' tensors concatenated along dim 0; backward hands back the own slice.

    ::

        V -> I    shape (n, ...) -> (W n, ...)   x0 -> [x0 x1]      g0[0] <- [g0[0] g0[1]]
                                                 x1 -> [x0 x1]      g1[1] <- [g1[0] g1[1]]

    That gradient is whole if every rank computes the same loss from the result, as the original expects. Where the
    losses differ, use `gradmesh.all_gather(x)`, whose backward sums over the ranks.

    An instance is a context, with the names that torch documents for one. The original's methods `save_for_backward`,
    `mark_dirty` and their like are inherited from torch's own context class; names that belong to a graph node
    (`next_functions`, `register_hook`, ...) speak of the node that `forward` recorded.
    """

    @staticmethod
    def apply(tensor: Tensor, args: Any, axis: AxisLike = None) -> Tensor:
        """Gather.

        Args:
            tensor: this rank's part, of one shape on all ranks.
            args: any object with the number of ranks as `args.world_size`. `args.local_rank` is not read: it is the
                rank on one machine, and the slice of the gradient is that of the rank on the axis.
            axis: the ranks to gather from; by default the current mesh's only axis, else the world.

        Raises:
            ArgumentError: `args.world_size` is not the number of ranks of the axis.

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
        found = resolve(axis, "compat.towhee.AllGather")
        world_size = getattr(args, "world_size", None)
        if world_size != found.size:
            raise ArgumentError(
                message(
                    "args.world_size is not the number of ranks of the axis",
                    op="compat.towhee.AllGather",
                    axis=str(found),
                    expected=f"args.world_size={found.size}",
                    got=f"args.world_size={world_size!r}",
                    remedy="set it to the size of the axis, or name another axis: AllGather.apply(x, args, axis)",
                )
            )
        return all_gather(tensor, found, dst=I)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make a context for `forward` and `backward`."""

    def __call__(self, *args: Any) -> Tensor:
        """Run `apply`."""
        return self.apply(*args)

    dirty_tensors: Any = None
    is_traceable = False
    materialize_grads = True
    non_differentiable: Any = None
    saved_for_forward: Any = None
    to_save: Any = None

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """What `save_for_backward` was given."""
        return tuple(self.to_save or ())

    saved_variables = saved_tensors

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """Whether each argument of `forward` gets a gradient."""
        _, _, others = self.recorded
        return (True, *(False for _ in others))

    @property
    def metadata(self) -> dict[Any, Any]:
        """The anomaly mode's notes on the node."""
        found: dict[Any, Any] = self._node.metadata
        return found

    @property
    def next_functions(self) -> tuple[Any, ...]:
        """The nodes behind this one."""
        found: tuple[Any, ...] = self._node.next_functions
        return found

    @property
    def requires_grad(self) -> bool:
        """Whether `forward` recorded a graph: always, once it ran."""
        return hasattr(self, "recorded")

    def name(self) -> str:
        """The name of the node."""
        return f"{type(self).__name__}Backward"

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """Call `hook` with the gradients whenever backward passes the node."""
        return self._node.register_hook(hook)

    recorded: tuple[Tensor, Tensor, tuple[Any, ...]]

    @property
    def _node(self) -> Any:
        return self.recorded[1].grad_fn
