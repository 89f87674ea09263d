"""Spectral normalization of sharded weights."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils import parametrize

from gradmesh.nn.sharding import mark_sharded
from gradmesh.runtime.mesh import Axis, AxisLike, resolve
from gradmesh.types import R
from gradmesh.verbs.call import Call, integer
from gradmesh.verbs.collectives import all_reduce, sizes

__all__ = ["SpectralNorm", "spectral_norm"]


class SpectralNorm(nn.Module):
    """The parametrization that `spectral_norm` registers; like torch's, for a sharded weight.

    Attributes:
        u, v: the estimates of the singular vectors; the one along the sharded dim is sharded. In a state dict they have
            torch's names, `_u` and `_v`.
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
        here, local = resolve(axis, "nn.fields.spectral_norm"), self._matrix(weight.detach())
        both, cut_dim = list(local.shape), 0 if cut == "rows" else 1
        self._each = each = tuple(sizes(local, here, cut_dim))
        both[cut_dim] = sum(each)
        # Draw full vectors, like torch: with equal seeds, the estimates are those of a single process.
        drawn = [normalize(local.new_empty(size).normal_(0, 1), dim=0, eps=eps) for size in both]
        drawn[cut_dim] = drawn[cut_dim][here.slice(each)]
        self.register_buffer("_u", drawn[0])
        self.register_buffer("_v", drawn[1])
        with torch.no_grad():
            self._iterate(local, here, 15)

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

    def _iterate(self, local: Tensor, here: Axis, times: int) -> None:
        for _ in range(times):
            self._u = self._unit(self._times(local, self._v, here, "columns"), here, "rows")
            self._v = self._unit(self._times(local.mH, self._u, here, "rows"), here, "columns")

    def _times(self, local: Tensor, vector: Tensor, here: Axis, summed: str) -> Tensor:
        made = local @ vector
        return all_reduce(made, here, dst=R) if self.cut == summed else made

    def _unit(self, vector: Tensor, here: Axis, dim: str) -> Tensor:
        if self.cut != dim:
            return normalize(vector, dim=0, eps=self.eps)
        squares = all_reduce((vector.abs() ** 2).sum(), here, dst=R)
        return vector / squares.sqrt().clamp_min(self.eps)

    def forward(self, weight: Tensor) -> Tensor:
        """The local shard of the weight, divided by the full weight's spectral norm."""
        here, local = resolve(self.over, "nn.fields.spectral_norm"), self._matrix(weight)
        if self.training:
            with torch.no_grad():
                self._iterate(local.detach(), here, self.n_power_iterations)
        u, v = self._u.clone(), self._v.clone()
        norm = all_reduce(torch.vdot(u, local @ v), here, dst=R)
        return weight / norm

    def _take(self, name: str, state: MutableMapping[str, Any], prefix: str) -> None:
        """Convert a state dict that is about to be loaded, in place.

        Keys may be those of torch's parametrization or of `torch.nn.utils.spectral_norm` (`weight_orig`, `weight_u`,
        `weight_v`); a full weight and full vectors are sharded.

        Args:
            name: of the parameter.
            state: the state dict.
            prefix: of the module's keys.
        """
        keys = f"{prefix}parametrizations.{name}."
        older = {f"{prefix}{name}_orig": "original"}
        older |= {f"{prefix}{name}_{each}": f"0._{each}" for each in "uv"}
        older |= {f"{keys}0.{each}": f"0._{each}" for each in "uv"}
        for old, new in older.items():
            if old in state and keys + new not in state:
                state[keys + new] = state.pop(old)
        here, cut_dim = resolve(self.over, "nn.fields.spectral_norm"), 0 if self.cut == "rows" else 1
        # Columns are all other dims flattened, the first of which is sharded.
        dim = self.first if self.cut == "rows" else int(self.first == 0)
        span = here.slice(self._each)
        vector = keys + ("0._u" if self.cut == "rows" else "0._v")
        if _along(state.get(vector), 0) == sum(self._each):
            state[vector] = state[vector][span]
        weight = state.get(f"{keys}original")
        if here.size > 1 and isinstance(weight, Tensor) and weight.dim() > max(dim, self.first):
            whole = self._matrix(weight)
            if whole.shape[cut_dim] == sum(self._each):
                inner = whole.shape[cut_dim] // weight.shape[dim]
                part = weight.narrow(dim, span.start // inner, (span.stop - span.start) // inner)
                state[f"{keys}original"] = part

    def right_inverse(self, value: Tensor) -> Tensor:
        """The assigned weight, unchanged."""
        return value


@dataclass
class _LoadHook:
    """A load_state_dict pre-hook; an object, so that deepcopy of the module copies its reference to the norm."""

    norm: SpectralNorm
    name: str

    def __call__(self, _: nn.Module, state: MutableMapping[str, Any], prefix: str, *__: Any) -> None:
        self.norm._take(self.name, state, prefix)


def _along(x: object, dim: int) -> int | None:
    """The size of a tensor along a dim, or None."""
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
    """Spectral normalization of a sharded weight: divide it by the largest singular value of the full weight.

    ::

        V -> V    local shard of W -> local shard of W / (u W v)
                  forward: a power iteration with products and norms summed over the ranks, and the sum u W v
                  backward: the gradient of the norm is summed over the ranks

    Values and gradients are those of `torch.nn.utils.parametrizations.spectral_norm` of the full weight; u and v are
    constants, as there.

    Args:
        module: holds the local shard, for example `gm.nn.ColumnParallelLinear` (rows) or `RowParallelLinear` (columns).
        name: of the parameter.
        axis: the ranks.
        n_power_iterations: for each call in training, at least 1.
        eps: lower bound of norms.
        dim: the dim of the weight that is the matrix rows; the others are flattened to columns. None: as in torch, 1
            for transposed convolutions and 0 otherwise.
        cut: "rows" or "columns", whichever are sharded. Columns must be sharded along the first dim that is not `dim`.

    Returns:
        The module; the parametrization is registered, and its parameter counts as a shard in `gm.nn.clip_grad_norm_`.
        `load_state_dict` accepts the module's state dict, and that of the full weight with
        `torch.nn.utils.parametrizations.spectral_norm` or `torch.nn.utils.spectral_norm`, of which each rank takes its
        shard.

    Raises:
        ArgumentError: a 1-d weight, `n_power_iterations` < 1, or unknown `cut`.

    Source: Miyato et al., Spectral normalization for generative adversarial networks (arXiv:1802.05957), algorithm 1.

    Example:
        >>> def on_each_rank():
        ...     layer = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.constant_(layer.weight, (3.0, 4.0)[gm.rank()])  # full weight (3, 4), norm 5
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
            "the weight has fewer than 2 dims",
            expected="a weight with at least 2 dims",
            got=f"shape {list(weight.shape)}",
            remedy='pass the name of a matrix, e.g. name="weight" of a linear layer',
        )
    if (integer(n_power_iterations) or 0) < 1:
        call.fail(
            "n_power_iterations must be a positive int",
            expected="e.g. n_power_iterations=1",
            got=f"n_power_iterations={n_power_iterations!r}",
            remedy="omit it for 1; to run no iterations, call module.eval()",
        )
    if dim is None:
        dim = int(isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d))
    here = SpectralNorm(
        weight, axis, n_power_iterations, eps, call.dim(dim) if call.x is weight else dim, cut
    )
    parametrize.register_parametrization(module, name, here)
    module.register_load_state_dict_pre_hook(_LoadHook(here, name))
    mark_sharded(module.parametrizations[name].original, axis)  # type: ignore[index,union-attr]  # of torch's list
    return module
