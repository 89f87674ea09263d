"""The verbs as each device runs them, and the expressions of programs, in JAX.

What is V, R or P varies over the axis in JAX's words, what is I does not; so `psum` makes I, and `pcast(to="varying")`
makes R of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


class _Torch:
    """An array with the methods of a torch tensor that expressions of programs use."""

    def __init__(self, array: Any) -> None:
        self.array = array

    sin, cos, exp, conj = (
        (lambda self, f=f: _Torch(f(self.array))) for f in (jnp.sin, jnp.cos, jnp.exp, jnp.conj)
    )
    T = property(lambda self: _Torch(jnp.swapaxes(self.array, 0, 1)))
    real = property(lambda self: _Torch(self.array.real))

    def detach(self) -> _Torch:
        return _Torch(lax.stop_gradient(self.array))

    def sum(self, dim: int | None = None, *, keepdim: bool = False) -> _Torch:
        return _Torch(self.array.sum(dim, keepdims=keepdim))

    def cumsum(self, dim: int) -> _Torch:
        return _Torch(jnp.cumsum(self.array, dim))

    def flip(self, dim: int) -> _Torch:
        return _Torch(jnp.flip(self.array, dim))

    def repeat(self, *times: int) -> _Torch:
        return _Torch(jnp.tile(self.array, times))

    def __getitem__(self, key: Any) -> _Torch:
        return _Torch(self.array[key])

    def __neg__(self) -> _Torch:
        return _Torch(-self.array)

    def __pow__(self, power: int) -> _Torch:
        return _Torch(self.array**power)

    def __add__(self, other: Any) -> _Torch:
        return _Torch(self.array + _array(other))

    def __sub__(self, other: Any) -> _Torch:
        return _Torch(self.array - _array(other))

    def __mul__(self, other: Any) -> _Torch:
        return _Torch(self.array * _array(other))

    __rmul__ = __mul__


def _array(x: Any) -> Any:
    return x.array if isinstance(x, _Torch) else x


_TORCH = SimpleNamespace(
    cat=lambda xs: _Torch(jnp.concatenate([x.array for x in xs])),
    zeros_like=lambda x: _Torch(jnp.zeros_like(x.array)),
)


@lru_cache(maxsize=4096)
def _compiled(text: str, args: int) -> Callable[..., Any]:
    names = [f"x{i}" for i in range(args)]
    made: Callable[..., Any] = eval(f"lambda {', '.join(names)}: {text.format(*names)}", {"torch": _TORCH})
    return made


def evaluated(text: str, *args: Any) -> Any:
    """An expression over arrays."""
    return _compiled(text, len(args))(*map(_Torch, args)).array


def _varying(x: Any, axis: str) -> Any:
    return lax.pcast(x, axis, to="varying")


def _only(x: Any, axis: str, rank: int) -> Any:
    return jnp.where(lax.axis_index(axis) == rank, x, jnp.zeros_like(x))


def _typed(x: Any, axis: str, dst: str) -> Any:
    return _varying(x, axis) if dst == "R" else x


_TO = {"R": "varying", "I": "invarying"}


def _all_reduce(x: Any, axis: str, op: str, dst: str) -> Any:
    if op in ("sum", "mean"):
        return _typed(lax.psum(x, axis) if op == "sum" else lax.pmean(x, axis), axis, dst)
    stacked = lax.all_gather(x, axis, to=_TO[dst])  # pmax has no derivative
    rules = {"max": jnp.max, "min": jnp.min, "prod": jnp.prod, "logsumexp": jax.scipy.special.logsumexp}
    return rules[op](stacked, 0)


def _reduce_scatter(x: Any, axis: str, dim: int, op: str = "sum", sizes: Any = None) -> Any:
    total = lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    return total / lax.axis_size(axis) if op == "mean" else total


def _all_to_all(x: Any, axis: str, split_dim: int, concat_dim: int, **_: Any) -> Any:
    return lax.all_to_all(x, axis, split_dim, concat_dim, tiled=True)


def _shard(x: Any, axis: str, dim: int, src: str, sizes: Any = None) -> Any:
    size = x.shape[dim] // lax.axis_size(axis)
    whole = _varying(x, axis) if src == "I" else x
    return lax.dynamic_slice_in_dim(whole, lax.axis_index(axis) * size, size, dim)


def _convert(x: Any, axis: str, src: str, dst: str) -> Any:
    if (src, dst) == ("R", "I"):
        return lax.psum(_only(x, axis, 0), axis)
    if dst == "P" and src != "V":
        return _only(_varying(x, axis) if src == "I" else x, axis, 0)
    return x


def _shift(x: Any, axis: str, offset: int, *, wrap: bool, **_: Any) -> Any:
    ranks = lax.axis_size(axis)
    pairs = [(rank, rank + offset) for rank in range(ranks)]
    pairs = [(source, target % ranks) for source, target in pairs if wrap or 0 <= target < ranks]
    return lax.ppermute(x, axis, pairs)


def _halo(x: Any, axis: str, dim: int, halo: tuple[int, int], *, wrap: bool, **_: Any) -> Any:
    size, (left, right) = x.shape[dim], halo
    parts = [lax.slice_in_dim(x, size - left, size, axis=dim), x, lax.slice_in_dim(x, 0, right, axis=dim)]
    return jnp.concatenate(
        [_shift(parts[0], axis, 1, wrap=wrap), x, _shift(parts[2], axis, -1, wrap=wrap)], dim
    )


def _running(x: Any, axis: str, *, reverse: bool, own: bool) -> Any:
    ranks, rank = jnp.arange(lax.axis_size(axis)), lax.axis_index(axis)
    before = ranks > rank if reverse else ranks < rank
    kept = before | (ranks == rank) if own else before
    return jnp.tensordot(kept.astype(x.dtype), lax.all_gather(x, axis), 1)


VERBS: dict[str, Callable[..., Any]] = {
    "all_gather": lambda x, a, dim, dst, sizes=None: lax.all_gather(x, a, axis=dim, tiled=True, to=_TO[dst]),  # noqa: ARG005
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": lambda x, a, root, dst: _typed(lax.psum(_only(x, a, root), a), a, dst),
    "convert": _convert,
    "exscan": lambda x, a, reverse: _running(x, a, reverse=reverse, own=False),
    "halo_exchange": _halo,
    "permute": lambda x, a, pairs, **_: lax.ppermute(x, a, pairs),
    "reduce": lambda x, a, root: _only(_varying(lax.psum(x, a), a), a, root),
    "reduce_scatter": _reduce_scatter,
    "replicate": _varying,
    "scan": lambda x, a, reverse: _running(x, a, reverse=reverse, own=True),
    "shard": _shard,
    "shift": _shift,
}
"""The verbs that JAX has, or that a line of JAX makes of those."""
