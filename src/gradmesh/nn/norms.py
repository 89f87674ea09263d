"""Batch and group norms with statistics of all ranks of an axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from gradmesh.errors import ArgumentError
from gradmesh.nn.inputs import readable, upcast
from gradmesh.runtime.mesh import Axis, AxisLike, resolve
from gradmesh.verbs.call import Call
from gradmesh.verbs.collectives import all_gather

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LAZY = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)


# Not a subclass of torch's SyncBatchNorm: DistributedDataParallel rejects those on a CPU.
class SyncBatchNorm(nn.BatchNorm1d):
    """Batch norm over the batches of all ranks, of any sizes, with exact derivatives of every order.

    ::

        V -> V    (n_r, c, ...) -> (n_r, c, ...)    each rank's mean, squares and count are gathered (2 c + 1 numbers)
                                                    backward: their gradients are summed over the ranks

    The weight and the bias are replicated and applied to local rows: a data parallel wrapper averages their gradients
    like all others; without a wrapper, use `gm.nn.Replicated`.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as in `torch.nn.BatchNorm2d`.
        axis: the ranks.

    Raises:
        ArgumentError: `x.shape[1]` differs from `num_features`; in training, fewer than 2 values per channel over all
            ranks (detected on a CPU).

    Source: Ioffe and Szegedy (arXiv:1502.03167), algorithm 1; the ranks' statistics are combined as in Chan, Golub
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
        """Replace all batch norms of a module, in place; a batch norm itself is converted and returned.

        A norm that is registered under two names stays shared. Hooks of the replaced norms are dropped.

        Raises:
            ArgumentError: a lazy norm, or a subclass that overrides `forward`; the module is unchanged.

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
                parent, _, last = name.rpartition(".")
                setattr(module.get_submodule(parent), last, made[each])
        return made.get(module, module)

    @classmethod
    def _of(cls, norm: nn.Module, axis: AxisLike) -> SyncBatchNorm:
        """A norm with the parameters and buffers of another one."""
        if isinstance(norm, _LAZY) or type(norm).forward not in [each.forward for each in _BATCH_NORMS]:
            raise ArgumentError.of(
                "cannot convert this norm",
                op="nn.SyncBatchNorm.converted",
                expected="torch's batch norms, or subclasses that do not override forward",
                got=type(norm).__name__,
                remedy="run one batch through the module first, which initializes its lazy norms"
                if isinstance(norm, _LAZY)
                else f"use gm.nn.SyncBatchNorm inside {type(norm).__name__}",
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
        wide = upcast(x)
        dims = [0, *range(2, x.dim())]
        mean, var, count = _statistics(wide, dims, here)
        if self.training and readable(x) and float(count) <= 1:
            Call("nn.SyncBatchNorm", x, here).fail(
                "too few values per channel to compute a variance",
                expected="at least 2 values per channel over all ranks",
                got=f"{int(count)}",
                remedy="use larger batches, or call module.eval()",
            )
        if self.training:
            self._remember(mean.detach(), var.detach() * (count / (count - 1)))
        shape = [1, -1, *[1] * (x.dim() - 2)]
        y = (wide - mean.view(shape)) * (var + self.eps).rsqrt().view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(x.dtype)

    def _remember(self, mean: Tensor, var: Tensor) -> None:
        """Update the running statistics."""
        kept, spread, seen = self.running_mean, self.running_var, self.num_batches_tracked
        if kept is None or spread is None or seen is None or not self.track_running_stats:
            return
        with torch.no_grad():
            seen += 1
            share = self.momentum if self.momentum is not None else 1.0 / seen.to(kept.dtype)
            kept += share * (mean.to(kept.dtype) - kept)
            spread += share * (var.to(spread.dtype) - spread)


class SyncGroupNorm(nn.GroupNorm):
    """Group norm of samples that are sharded over ranks along a dim after the channels.

    ::

        V -> V    (n, c, p_r, ...) -> (n, c, p_r, ...)    each sample's and group's mean, squares and count are gathered
                                                          backward: their gradients are summed over the ranks

    Args:
        num_groups, num_channels, eps, affine, device, dtype: as in `torch.nn.GroupNorm`.
        axis: the ranks.

    The weight and the bias are applied to local positions: use `gm.nn.Replicated`, unless a wrapper sums their
    gradients.

    Raises:
        ArgumentError: `x.shape[1]` differs from `num_channels`.

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
        wide = upcast(x)
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
            "the input has a wrong number of channels, or is not floating point",
            expected=f"a floating-point tensor of shape (n, {channels}, ...)",
            got=f"{x.dtype} of shape {list(x.shape)}",
            remedy=f"channels are dim 1: construct the layer with {x.shape[1]} channels, or transpose the input"
            if x.dim() > 1 and x.is_floating_point()
            else "pass e.g. x.float() with the channels in dim 1",
        )


def _statistics(x: Tensor, dims: list[int], here: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance along `dims` over all ranks, and the number of values."""
    count = 1
    for dim in dims:
        count *= x.shape[dim]
    mean = x.sum(dims, keepdim=True) / max(count, 1)
    squares = ((x - mean) ** 2).sum(dims)
    mean = mean.view_as(squares)
    local = torch.cat((mean.reshape(-1), squares.reshape(-1), mean.new_full((1,), count)))
    means, others, counts = all_gather(local.unsqueeze(0), here).split((mean.numel(), mean.numel(), 1), dim=1)
    total = counts.sum()
    whole = (counts * means).sum(0) / total
    summed = (others + counts * (means - whole) ** 2).sum(0)
    return whole.view_as(mean), (summed / total).view_as(mean), total.detach()
