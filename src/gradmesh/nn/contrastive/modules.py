"""The losses as modules, with their learned parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from gradmesh.nn.contrastive.moments import barlow_twins_loss, vic_reg_loss
from gradmesh.nn.contrastive.pairs import clip_loss, siglip_loss
from gradmesh.nn.contrastive.views import nt_xent_loss, sup_con_loss
from gradmesh.runtime.mesh import AxisLike

__all__ = ["BarlowTwinsLoss", "ClipLoss", "NTXentLoss", "SigLipLoss", "SupConLoss", "VicRegLoss"]


class _Loss(nn.Module):
    """A loss with the options of its function."""

    def __init__(self, axis: AxisLike, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = {"axis": axis, **options}

    def extra_repr(self) -> str:
        """The options that are not None."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items() if value is not None)

    def _hold(self, name: str, value: float, learnable: bool) -> None:
        """Register a number with shape (1,): wrappers that shard parameters reject 0-dim ones."""
        number = torch.tensor([value])
        if learnable:
            self.register_parameter(name, nn.Parameter(number))
        else:
            self.register_buffer(name, number)


class _ScaledLoss(_Loss):
    """A loss with a scale of the similarities, stored as its logarithm."""

    log_scale: Tensor

    def __init__(
        self, scale: float, max_scale: float, axis: AxisLike, learnable: bool, options: dict[str, Any]
    ) -> None:
        super().__init__(axis, options)
        self._largest = math.log(max_scale)
        self._hold("log_scale", math.log(scale), learnable)

    @property
    def scale(self) -> Tensor:
        """The scale, a tensor of one element."""
        return self.log_scale.exp()

    def _bounded(self) -> Tensor:
        """The scale; in training a learned one is first clamped to `max_scale`."""
        if not (self.training and self.log_scale.requires_grad):
            return self.scale
        if not self.log_scale.is_leaf:  # a view of a wrapper's gathered buffer, which must not be written
            return (self.log_scale - (self.log_scale.detach() - self._largest).clamp(min=0)).exp()
        with torch.no_grad():
            self.log_scale.clamp_(max=self._largest)
        return self.scale


class ClipLoss(_ScaledLoss):
    """`gradmesh.nn.clip_loss` with a learned scale.

    Args:
        scale: the initial inverse temperature.
        axis: the ranks.
        learnable: True makes it a parameter, `log_scale`; put the loss into the module that DDP or FSDP wraps.
        max_scale: upper bound in training, as in the paper. The parameter is clamped; if FSDP shards it, only the value
            in use is.
        options: as in `clip_loss`.

    Example:
        >>> def on_each_rank():
        ...     loss = gm.nn.ClipLoss(sizes=None)
        ...     x = torch.eye(4)[2 * gm.rank() :][:2]
        ...     return round(loss.scale.item(), 2), round(loss(x, x).item(), 6)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(14.29, 2e-06), (14.29, 2e-06)]
    """

    def __init__(
        self,
        scale: float = 1 / 0.07,
        axis: AxisLike = None,
        *,
        learnable: bool = True,
        max_scale: float = 100.0,
        **options: Any,
    ) -> None:
        super().__init__(scale, max_scale, axis, learnable, options)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """The loss; `left` and `right` are this rank's embeddings."""
        return clip_loss(left, right, self._bounded(), **self.options)


class SigLipLoss(_ScaledLoss):
    """`gradmesh.nn.siglip_loss` with a learned scale and bias.

    Args:
        scale: the initial inverse temperature.
        bias: the initial value that is added to the scaled similarities.
        axis: the ranks.
        learnable: True makes them parameters, `log_scale` and `bias`; put the loss into the module that DDP or FSDP
            wraps.
        max_scale: upper bound of the scale in training.
        options: as in `siglip_loss`.

    Example:
        >>> def on_each_rank():
        ...     x = torch.eye(4)[2 * gm.rank() :][:2]
        ...     return round(gm.nn.SigLipLoss()(x, x).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0.6933, 0.6933]
    """

    bias: Tensor

    def __init__(
        self,
        scale: float = 10.0,
        bias: float = -10.0,
        axis: AxisLike = None,
        *,
        learnable: bool = True,
        max_scale: float = math.inf,
        **options: Any,
    ) -> None:
        super().__init__(scale, max_scale, axis, learnable, options)
        self._hold("bias", bias, learnable)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """The loss; `left` and `right` are this rank's embeddings."""
        return siglip_loss(left, right, self._bounded(), self.bias, **self.options)


class NTXentLoss(_ScaledLoss):
    """`gradmesh.nn.nt_xent_loss`.

    Args:
        temperature: the initial temperature.
        axis: the ranks.
        learnable: True makes it a parameter, `log_scale` = -log(temperature).
        options: as in `nt_xent_loss`.

    Example:
        >>> def on_each_rank():
        ...     x = torch.eye(4)[2 * gm.rank() :][:2]
        ...     return round(gm.nn.NTXentLoss()(x, x).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0.5944, 0.5944]
    """

    def __init__(
        self, temperature: float = 0.5, axis: AxisLike = None, *, learnable: bool = False, **options: Any
    ) -> None:
        super().__init__(1 / temperature, math.inf, axis, learnable, options)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """The loss; `left` and `right` are this rank's embeddings of the two views."""
        return nt_xent_loss(left, right, 1 / self._bounded(), **self.options)


class SupConLoss(_ScaledLoss):
    """`gradmesh.nn.sup_con_loss`.

    Args:
        temperature: the initial temperature.
        axis: the ranks.
        learnable: True makes it a parameter, `log_scale` = -log(temperature).
        options: as in `sup_con_loss`.

    Example:
        >>> def on_each_rank():
        ...     x, labels = torch.eye(4)[2 * gm.rank() :][:2], torch.tensor([0, 1])
        ...     return round(gm.nn.SupConLoss(1.0)(x, labels).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [1.0986, 1.0986]
    """

    def __init__(
        self, temperature: float = 0.07, axis: AxisLike = None, *, learnable: bool = False, **options: Any
    ) -> None:
        super().__init__(1 / temperature, math.inf, axis, learnable, options)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss; `x` and `labels` are this rank's embeddings and labels."""
        return sup_con_loss(x, labels, 1 / self._bounded(), **self.options)


class VicRegLoss(_Loss):
    """`gradmesh.nn.vic_reg_loss` as a module; `options` are its arguments.

    Example:
        >>> def on_each_rank():
        ...     x = torch.eye(4)[2 * gm.rank() :][:2]
        ...     return round(gm.nn.VicRegLoss(invariance=1.0)(x, x + 1).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [13.5392, 13.5392]
    """

    def __init__(self, axis: AxisLike = None, **options: Any) -> None:
        super().__init__(axis, options)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """The loss; `left` and `right` are this rank's embeddings of the two views."""
        return vic_reg_loss(left, right, **self.options)


class BarlowTwinsLoss(_Loss):
    """`gradmesh.nn.barlow_twins_loss` as a module; `options` are its arguments.

    Example:
        >>> def on_each_rank():
        ...     x = torch.eye(4)[2 * gm.rank() :][:2]
        ...     return round(gm.nn.BarlowTwinsLoss(off_diagonal=1.0)(x, x).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [1.3332, 1.3332]
    """

    def __init__(self, axis: AxisLike = None, **options: Any) -> None:
        super().__init__(axis, options)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """The loss; `left` and `right` are this rank's embeddings of the two views."""
        return barlow_twins_loss(left, right, **self.options)
