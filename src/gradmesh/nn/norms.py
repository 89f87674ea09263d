"""Batch and group norms whose statistics are those of all ranks of an axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from gradmesh.arguments import Call
from gradmesh.axis import Axis, AxisLike, resolve
from gradmesh.collectives import all_gather
from gradmesh.errors import ArgumentError, message
from gradmesh.nn.plain import known, widened

__all__ = ["SyncBatchNorm", "SyncGroupNorm"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LAZY = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)


# Of torch's own SyncBatchNorm no subclass works under DistributedDataParallel without a GPU.
class SyncBatchNorm(nn.BatchNorm1d):
    """Batch norm over the batches of all ranks, of any sizes, with exact derivatives of every order.

    ::

        V -> V    (n_r, c, ...) -> (n_r, c, ...)    each rank's mean, squares and count are gathered (2 c + 1 numbers)
                                                    backward: their gradients are summed over the ranks

    The weight and the bias are on every rank, which uses them on own rows: a data parallel wrapper averages their
    gradients as it does the others'; without one, `gm.nn.Replicated`.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as in `torch.nn.BatchNorm2d`.
        axis: the ranks.

    Raises:
        ArgumentError: another number of channels; one value per channel on all ranks, in training (on a CPU).

    Source: Ioffe and Szegedy (arXiv:1502.03167), algorithm 1; the ranks' statistics are put together as in Chan, Golub
    and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances (1979), equation 2.1.

    Example:
        >>> def on_each_rank():
        ...     x = torch.arange(3.0).view(3, 1)[gm.axis().slice((1, 2))]
        ...     y = gm.nn.SyncBatchNorm(1, affine=False)(x)
        ...     return [round(value, 3) for value in y.flatten().tolist()]
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[-1.225], [0.0, 1.225]]
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        axis: AxisLike = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.over = axis

    @classmethod
    def converted(cls, module: nn.Module, axis: AxisLike = None) -> nn.Module:
        """The module with all its batch norms made synchronised, in place; a batch norm itself is returned as one.

        A norm with two names is one norm still. Hooks of the norms that were are not taken over.

        Raises:
            ArgumentError: a lazy norm, or one of a class with a forward of its own; nothing is changed.

        Example:
            >>> net = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3), torch.nn.BatchNorm1d(2))
            >>> type(gm.nn.SyncBatchNorm.converted(net)[1]).__name__
            'SyncBatchNorm'
        """
        names = list(module.named_modules(remove_duplicate=False))
        norms = [
            each for _, each in names if isinstance(each, _BATCH_NORMS + _LAZY) and not isinstance(each, cls)
        ]
        made: dict[nn.Module, nn.Module] = {each: cls._of(each, axis) for each in norms}
        for name, each in names:
            if name and each in made:
                room, _, last = name.rpartition(".")
                setattr(module.get_submodule(room), last, made[each])
        return made.get(module, module)

    @classmethod
    def _of(cls, norm: nn.Module, axis: AxisLike) -> SyncBatchNorm:
        """The synchronised norm that has the parameters and the statistics of one."""
        if isinstance(norm, _LAZY) or type(norm).forward not in [each.forward for each in _BATCH_NORMS]:
            raise ArgumentError(
                message(
                    "a norm cannot be made synchronised",
                    op="nn.SyncBatchNorm.converted",
                    expected="torch's batch norms, or subclasses with the same forward",
                    got=type(norm).__name__,
                    remedy="show a lazy one a batch first; let another class call SyncBatchNorm itself",
                )
            )
        old: Any = norm
        numbers = (old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats)
        made = cls(*numbers, axis, device="meta")
        for name, value in [*old.named_parameters(recurse=False), *old.named_buffers(recurse=False)]:
            setattr(made, name, value)
        return made.train(old.training)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """The normalised rows; see the class."""
        here, x = resolve(self.over, "nn.SyncBatchNorm"), input
        _check_channels("nn.SyncBatchNorm", x, self.num_features, here)
        if not self.training and self.running_mean is not None:
            return batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        wide = widened(x)
        dims = [0, *range(2, x.dim())]
        mean, var, count = _statistics(wide, dims, here)
        if self.training and known(x) and float(count) <= 1:
            Call("nn.SyncBatchNorm", x, here).fail(
                "there is no variance of one value per channel",
                expected="2 values or more per channel on all ranks together",
                got=f"{int(count)}",
                remedy="take larger batches, or module.eval()",
            )
        if self.training:
            self._remember(mean.detach(), var.detach() * (count / (count - 1)))
        shape = [1, -1, *[1] * (x.dim() - 2)]
        y = (wide - mean.view(shape)) * (var + self.eps).rsqrt().view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(x.dtype)

    def _remember(self, mean: Tensor, var: Tensor) -> None:
        """Move the running statistics by a step."""
        kept, spread, seen = self.running_mean, self.running_var, self.num_batches_tracked
        if kept is None or spread is None or seen is None or not self.track_running_stats:
            return
        with torch.no_grad():
            seen += 1
            share = self.momentum if self.momentum is not None else 1.0 / seen.to(kept.dtype)
            kept += share * (mean.to(kept.dtype) - kept)
            spread += share * (var.to(spread.dtype) - spread)


class SyncGroupNorm(nn.GroupNorm):
    """Group norm of samples that are cut over ranks along a dim behind the channels, of which each has some positions.

    ::

        V -> V    (n, c, p_r, ...) -> (n, c, p_r, ...)    each sample's and group's mean, squares and count are gathered

    Args:
        num_groups, num_channels, eps, affine, device, dtype: as in `torch.nn.GroupNorm`.
        axis: the ranks.

    The weight and the bias are used on own positions: `gm.nn.Replicated`, unless a wrapper sums their gradients.

    Raises:
        ArgumentError: another number of channels.

    Source: Wu and He (arXiv:1803.08494), equation 7.

    Example:
        >>> def on_each_rank():
        ...     x = torch.arange(4.0).view(1, 1, 4)[..., gm.axis().slice((1, 3))]
        ...     y = gm.nn.SyncGroupNorm(1, 1)(x)
        ...     return [round(value, 3) for value in y.flatten().tolist()]
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[-1.342], [-0.447, 0.447, 1.342]]
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        axis: AxisLike = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device=device, dtype=dtype)
        self.over = axis

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """The normalised positions; see the class."""
        here, x = resolve(self.over, "nn.SyncGroupNorm"), input
        _check_channels("nn.SyncGroupNorm", x, self.num_channels, here)
        wide = widened(x)
        grouped = wide.reshape(len(x), self.num_groups, x.shape[1] // self.num_groups, *x.shape[2:])
        mean, var, _ = _statistics(grouped, list(range(2, grouped.dim())), here)
        shape = [len(x), self.num_groups, *[1] * (grouped.dim() - 2)]
        y = ((grouped - mean.view(shape)) * (var + self.eps).rsqrt().view(shape)).view_as(wide)
        if self.affine:
            shape = [1, -1, *[1] * (x.dim() - 2)]
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(x.dtype)


def _check_channels(verb: str, x: Tensor, channels: int, here: Axis) -> None:
    if x.dim() < 2 or x.shape[1] != channels or not x.is_floating_point():
        Call(verb, x, here).fail(
            "the input has other channels, or no floating-point numbers",
            expected=f"shape (n, {channels}, ...)",
            got=f"{x.dtype} of shape {list(x.shape)}",
            remedy="the channels are dim 1",
        )


def _statistics(x: Tensor, dims: list[int], here: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance along `dims` over all ranks, and of how many values, from those of each rank."""
    own = 1
    for dim in dims:
        own *= x.shape[dim]
    mean = x.sum(dims, keepdim=True) / max(own, 1)
    squares = ((x - mean) ** 2).sum(dims)
    mean = mean.view_as(squares)
    told = torch.cat((mean.reshape(-1), squares.reshape(-1), mean.new_tensor([own])))
    means, others, counts = all_gather(told.unsqueeze(0), here).split((mean.numel(), mean.numel(), 1), dim=1)
    total = counts.sum()
    whole = (counts * means).sum(0) / total
    summed = (others + counts * (means - whole) ** 2).sum(0)
    return whole.view_as(mean), (summed / total).view_as(mean), total.detach()
