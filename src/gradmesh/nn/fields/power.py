"""Spectral norms of weights that are cut over ranks."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils import parametrize

from gradmesh.arguments import Call, integer
from gradmesh.axis import Axis, AxisLike, resolve
from gradmesh.collectives import all_reduce, sizes
from gradmesh.nn.sharding import mark_sharded
from gradmesh.types import R

__all__ = ["SpectralNorm", "spectral_norm"]


class SpectralNorm(nn.Module):
    """The parametrization that `spectral_norm` registers; as torch's of the same name, for a weight in parts.

    Attributes:
        u, v: the estimates of the singular vectors; of the one along the sharded dim the local part. In a state dict
            they have torch's names, `_u` and `_v`.
    """

    _u: Tensor
    _v: Tensor

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
        self._each = each = tuple(sizes(own, here, cut_dim))
        both[cut_dim] = sum(each)
        # Drawn whole, as torch draws them: ranks that are seeded alike have the estimates of one process.
        drawn = [normalize(own.new_empty(size).normal_(0, 1), dim=0, eps=eps) for size in both]
        drawn[cut_dim] = drawn[cut_dim][here.slice(each)]
        self.register_buffer("_u", drawn[0])
        self.register_buffer("_v", drawn[1])
        with torch.no_grad():
            self._iterate(own, here, 15)

    @property
    def u(self) -> Tensor:
        """The estimate of the left singular vector."""
        return self._u

    @u.setter
    def u(self, value: Tensor) -> None:
        self._u = value

    @property
    def v(self) -> Tensor:
        """The estimate of the right singular vector."""
        return self._v

    @v.setter
    def v(self, value: Tensor) -> None:
        self._v = value

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.movedim(self.first, 0).flatten(1)

    def _iterate(self, own: Tensor, here: Axis, times: int) -> None:
        for _ in range(times):
            self._u = self._unit(self._times(own, self._v, here, "columns"), here, "rows")
            self._v = self._unit(self._times(own.mH, self._u, here, "rows"), here, "columns")

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
        u, v = self._u.clone(), self._v.clone()
        norm = all_reduce(torch.vdot(u, own @ v), here, dst=R)
        return weight / norm

    def _take(self, name: str, state: MutableMapping[str, Any], prefix: str) -> None:
        """Convert the state of the whole weight, or one under other names, to that of the local part.

        Args:
            name: of the parameter.
            state: a state dict that is about to be loaded, with the names of this class, of torch's parametrization
                (the same) or of `torch.nn.utils.spectral_norm` (`weight_orig`, `weight_u`, `weight_v`).
            prefix: of the module's names in it.
        """
        room = f"{prefix}parametrizations.{name}."
        older = {f"{prefix}{name}_orig": "original"}
        older |= {f"{prefix}{name}_{each}": f"0._{each}" for each in "uv"}
        older |= {f"{room}0.{each}": f"0._{each}" for each in "uv"}
        for old, new in older.items():
            if old in state and room + new not in state:
                state[room + new] = state.pop(old)
        here, cut_dim = resolve(self.over, "nn.fields.spectral_norm"), 0 if self.cut == "rows" else 1
        # Columns are those of all other dims together, of which the first one is cut.
        dim = self.first if self.cut == "rows" else int(self.first == 0)
        own = here.slice(self._each)
        vector = room + ("0._u" if self.cut == "rows" else "0._v")
        if _along(state.get(vector), 0) == sum(self._each):
            state[vector] = state[vector][own]
        weight = state.get(f"{room}original")
        if here.size > 1 and isinstance(weight, Tensor) and weight.dim() > max(dim, self.first):
            whole = self._matrix(weight)
            if whole.shape[cut_dim] == sum(self._each):
                inner = whole.shape[cut_dim] // weight.shape[dim]
                part = weight.narrow(dim, own.start // inner, (own.stop - own.start) // inner)
                state[f"{room}original"] = part

    def right_inverse(self, value: Tensor) -> Tensor:
        """The weight that is assigned."""
        return value


@dataclass
class _Taking:
    """A hook before a state dict is loaded; of a class, so that a copy of the module has a copy of it."""

    norm: SpectralNorm
    name: str

    def __call__(self, _: nn.Module, state: MutableMapping[str, Any], prefix: str, *__: Any) -> None:
        self.norm._take(self.name, state, prefix)


def _along(x: object, dim: int) -> int | None:
    """The size of a tensor along a dim; None: it has none."""
    return x.shape[dim] if isinstance(x, Tensor) and x.dim() > dim else None


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
        n_power_iterations: for each call in training; 1 or more.
        eps: no norm is taken to be smaller.
        dim: the dim of the weight that makes rows; the others make columns. None: as in torch, 1 for transposed
            convolutions and 0 for all else.
        cut: whether each rank has some "rows", or some "columns". Columns have to be cut along the first dim that is
            not the rows', so that the parts one after another are the whole.

    Returns:
        The module; the parametrization is registered, and its parameter counts as a shard in
        `gm.nn.clip_grad_norm_`. `load_state_dict` takes the module's own state, and that of the whole weight by
        `torch.nn.utils.parametrizations.spectral_norm` or `torch.nn.utils.spectral_norm`, of which each rank takes its
        part.

    Raises:
        ArgumentError: a weight of one dim, no power iterations, or `cut` of another kind.

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
    if (integer(n_power_iterations) or 0) < 1:
        call.fail(
            "n_power_iterations has to be positive",
            expected="an int of 1 or more",
            got=f"n_power_iterations={n_power_iterations!r}",
            remedy="pass 1; in evaluation, after module.eval(), none are made",
        )
    if dim is None:
        dim = int(isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d))
    here = SpectralNorm(
        weight, axis, n_power_iterations, eps, call.dim(dim) if call.x is weight else dim, cut
    )
    parametrize.register_parametrization(module, name, here)
    module.register_load_state_dict_pre_hook(_Taking(here, name))
    mark_sharded(module.parametrizations[name].original, axis)  # type: ignore[index,union-attr]  # of torch's list
    return module
