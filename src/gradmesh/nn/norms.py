"""Batch and group norms whose statistics are those of all ranks of an axis."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from gradmesh._torch import is_fake, transforms_active
from gradmesh.arguments import Call
from gradmesh.axis import Axis, AxisLike, resolve
from gradmesh.collectives import all_gather
from gradmesh.wire import compiling

__all__ = ["SyncBatchNorm", "SyncGroupNorm"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class SyncBatchNorm(nn.SyncBatchNorm):
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
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, None, device=device, dtype=dtype
        )
        self.over = axis

    @classmethod
    def converted(cls, module: nn.Module, axis: AxisLike = None) -> nn.Module:
        """The module with all its batch norms made synchronised, in place; a batch norm itself is returned as one.

        Example:
            >>> net = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3), torch.nn.BatchNorm1d(2))
            >>> type(gm.nn.SyncBatchNorm.converted(net)[1]).__name__
            'SyncBatchNorm'
        """
        if isinstance(module, _BATCH_NORMS) and not isinstance(module, cls):
            made = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                axis,
                device="meta",
            )
            for name, value in [
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ]:
                setattr(made, name, value)
            return made.train(module.training)
        for name, child in list(module.named_children()):
            setattr(module, name, cls.converted(child, axis))
        return module

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """The normalised rows; see the class."""
        here, x = resolve(self.over, "nn.SyncBatchNorm"), input
        if x.dim() < 2 or x.shape[1] != self.num_features:
            Call("nn.SyncBatchNorm", x, here).fail(
                "the input has other channels",
                expected=f"shape (n, {self.num_features}, ...)",
                got=f"shape {list(x.shape)}",
                remedy="the channels are dim 1",
            )
        if not self.training and self.running_mean is not None:
            return batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        wide = _wide(x)
        dims = [0, *range(2, x.dim())]
        mean, var, count = _statistics(wide, dims, here)
        if self.training and _known(x) and float(count) <= 1:
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
        if kept is None or spread is None or seen is None:
            return
        with torch.no_grad():
            seen += 1
            share = self.momentum if self.momentum is not None else 1.0 / seen
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
        if x.dim() < 2 or x.shape[1] != self.num_channels:
            Call("nn.SyncGroupNorm", x, here).fail(
                "the input has other channels",
                expected=f"shape (n, {self.num_channels}, ...)",
                got=f"shape {list(x.shape)}",
                remedy="the channels are dim 1",
            )
        wide = _wide(x)
        grouped = wide.reshape(len(x), self.num_groups, x.shape[1] // self.num_groups, *x.shape[2:])
        mean, var, _ = _statistics(grouped, list(range(2, grouped.dim())), here)
        shape = [len(x), self.num_groups, *[1] * (grouped.dim() - 2)]
        y = ((grouped - mean.view(shape)) * (var + self.eps).rsqrt().view(shape)).view_as(wide)
        if self.affine:
            shape = [1, -1, *[1] * (x.dim() - 2)]
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _known(x: Tensor) -> bool:
    """Whether a number can be asked for without waiting for a device or stopping a tracer."""
    return x.device.type == "cpu" and not compiling() and not is_fake(x) and not transforms_active()


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
