"""Spectral norms of weights that are cut over ranks."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils import parametrize

from gradmesh.arguments import Call
from gradmesh.axis import Axis, AxisLike, resolve
from gradmesh.collectives import all_reduce, sizes
from gradmesh.types import R

__all__ = ["SpectralNorm", "spectral_norm"]


class SpectralNorm(nn.Module):
    """The parametrization that `spectral_norm` registers; as torch's of the same name, for a weight in parts.

    Attributes:
        u, v: the estimates of the singular vectors; of the one along the cut dim the own part.
    """

    u: Tensor
    v: Tensor

    def __init__(
        self,
        weight: Tensor,
        axis: AxisLike,
        n_power_iterations: int,
        eps: float,
        dim: int,
        cut: Literal["rows", "columns"],
    ) -> None:
        super().__init__()
        self.over, self.n_power_iterations, self.eps, self.first, self.cut = (
            axis,
            n_power_iterations,
            eps,
            dim,
            cut,
        )
        here, own = resolve(axis, "nn.fields.spectral_norm"), self._matrix(weight.detach())
        both, cut_dim = list(own.shape), 0 if cut == "rows" else 1
        each = sizes(own, here, cut_dim)
        both[cut_dim] = sum(each)
        # Drawn whole, as torch draws them: ranks that are seeded alike have the estimates of one process.
        drawn = [normalize(own.new_empty(size).normal_(0, 1), dim=0, eps=eps) for size in both]
        drawn[cut_dim] = drawn[cut_dim][here.slice(each)]
        self.register_buffer("u", drawn[0])
        self.register_buffer("v", drawn[1])
        with torch.no_grad():
            self._iterate(own, here, 15)

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.movedim(self.first, 0).flatten(1)

    def _iterate(self, own: Tensor, here: Axis, times: int) -> None:
        for _ in range(times):
            self.u = self._unit(self._times(own, self.v, here, "columns"), here, "rows")
            self.v = self._unit(self._times(own.mH, self.u, here, "rows"), here, "columns")

    def _times(self, own: Tensor, vector: Tensor, here: Axis, summed: str) -> Tensor:
        made = own @ vector
        return all_reduce(made, here, dst=R) if self.cut == summed else made

    def _unit(self, vector: Tensor, here: Axis, dim: str) -> Tensor:
        if self.cut != dim:
            return normalize(vector, dim=0, eps=self.eps)
        squares = all_reduce((vector.abs() ** 2).sum(), here, dst=R)
        return vector / squares.sqrt().clamp_min(self.eps)

    def forward(self, weight: Tensor) -> Tensor:
        """The own part of the weight, divided by the norm of the whole."""
        here, own = resolve(self.over, "nn.fields.spectral_norm"), self._matrix(weight)
        if self.training:
            with torch.no_grad():
                self._iterate(own.detach(), here, self.n_power_iterations)
        u, v = self.u.clone(), self.v.clone()
        norm = all_reduce(torch.vdot(u, own @ v), here, dst=R)
        return weight / norm

    def right_inverse(self, value: Tensor) -> Tensor:
        """The weight that is assigned."""
        return value


def spectral_norm(
    module: nn.Module,
    name: str = "weight",
    axis: AxisLike = None,
    *,
    n_power_iterations: int = 1,
    eps: float = 1e-12,
    dim: int | None = None,
    cut: Literal["rows", "columns"] = "rows",
) -> nn.Module:
    """Divide a weight of which each rank has a part by the largest singular value of the whole.

    ::

        V -> V    own part of W -> own part of W / (u W v)
                  forward: a power iteration, whose products and norms are summed over the ranks; the own part's u W v
                  likewise; backward: the sum over the ranks of what each sends to the norm

    Values and gradients are those of `torch.nn.utils.parametrizations.spectral_norm` of the whole weight, in which u
    and v are constants, as there. The norm of the own part is another, smaller number.

    Args:
        module: has the own part, as `gm.nn.ColumnParallelLinear` has rows and `RowParallelLinear` columns.
        name: of the parameter.
        axis: the ranks.
        n_power_iterations: for each call in training.
        eps: no norm is taken to be smaller.
        dim: the dim of the weight that makes rows; the others make columns. None: as in torch, 1 for transposed
            convolutions and 0 for all else.
        cut: whether each rank has some "rows", or some "columns". Columns have to be cut along the first dim that is
            not the rows', so that the parts one after another are the whole.

    Returns:
        The module; the parametrization is registered.

    Raises:
        ArgumentError: a weight of one dim, or `cut` of another kind.

    Source: Miyato et al., Spectral normalization for generative adversarial networks (arXiv:1802.05957), algorithm 1.

    Example:
        >>> def on_each_rank():
        ...     layer = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.constant_(layer.weight, (3.0, 4.0)[gm.rank()])  # the whole: (3, 4), of norm 5
        ...     gm.nn.fields.spectral_norm(layer)
        ...     return round(layer.weight.item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0.6, 0.8]
    """
    weight: Any = getattr(module, name, None)
    call = Call("nn.fields.spectral_norm", weight, axis)
    call.choose("cut", cut, {"rows": 0, "columns": 0})
    if weight.dim() < 2:
        call.fail(
            "the weight is no matrix",
            expected="2 dims or more",
            got=f"shape {list(weight.shape)}",
            remedy="a vector's norm is gradmesh.all_reduce of its squares",
        )
    if dim is None:
        dim = int(isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d))
    here = SpectralNorm(
        weight, axis, n_power_iterations, eps, call.dim(dim) if call.x is weight else dim, cut
    )
    parametrize.register_parametrization(module, name, here)
    return module
