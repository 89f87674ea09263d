"""Programs under JAX, as its own interpreter runs them: `jax.shard_map` over host devices, differentiated by JAX.

JAX follows by itself over which axes a value varies, and here it has to come to the same types.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from tools.attack.calls import Leaf, Local, Verb, pick
from tools.attack.programs import Program, Term


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


Job = dict[str, Any]
"""The program, the types of its variables, and its leaves and their tangents as (shape, numbers)."""

Arrays = dict[str, Any]


def _varies(x: Any) -> frozenset[str]:
    """The axes over which JAX says that an array varies."""
    kind = jax.typeof(x)
    found: frozenset[str] = kind.mat.varying if hasattr(kind, "mat") else kind.vma  # vma until JAX 0.9
    return found


class _Run:
    """A program as functions of its leaves: what is of type I is one array, else the ranks' lie side by side."""

    def __init__(self, job: Job) -> None:
        self.program: Program = job["program"]
        self.types: dict[str, dict[str, str]] = job["types"]
        self.axes = self.program.axes if self.program.mesh else ("ranks",)
        devices = np.array(jax.devices()[: self.program.ranks])
        self.mesh = Mesh(devices.reshape((2, 2) if self.program.mesh else -1), self.axes)

    def over(self, name: str) -> tuple[str, ...]:
        """The axes over which a variable varies."""
        types = self.types[name]
        return tuple(axis for axis in self.axes if types["" if axis == "ranks" else axis] != "I")

    def place(self, name: str, rank: int) -> int:
        """Where a rank's value is among those that differ."""
        at = 0
        for axis, size in zip(self.axes, self.mesh.devices.shape, strict=True):
            own = rank if len(self.axes) == 1 else (rank // 2 if axis == "rows" else rank % 2)
            at = at * size + own if axis in self.over(name) else at
        return at

    def variables(self, leaves: Arrays) -> Arrays:
        """All variables but the leaves."""
        made = [name for name in self.types if name not in leaves]
        mapped = jax.shard_map(
            self._body,
            mesh=self.mesh,
            in_specs=({name: Spec(self.over(name)) for name in leaves},),
            out_specs={name: Spec(self.over(name)) for name in made},
        )
        done: Arrays = mapped(leaves)
        return done

    def _body(self, leaves: Arrays) -> Arrays:
        values = {name: x[0] for name, x in leaves.items()}
        for statement in self.program.flat:
            if isinstance(statement, Leaf):
                continue
            step = self._local if isinstance(statement, Local) else self._verb
            made = values[statement.name] = step(statement, values)
            if _varies(made) != set(self.over(statement.name)):
                raise TypeError(f"{statement.name} varies over {set(_varies(made))}, and is {self.types}")
        return {name: x[None] for name, x in values.items() if name not in leaves}

    def _local(self, local: Local, values: Arrays) -> Any:
        args, kinds = [values[name] for name in local.args], list(dict.fromkeys(local.texts))
        each = [evaluated(text, *args) for text in kinds]
        if len(kinds) == 1:
            # A constant is of its operand's type to the ranks; JAX has it vary over nothing.
            missing = set(self.over(local.name)) - _varies(each[0])
            return lax.pcast(each[0], tuple(missing), to="varying")
        which = jnp.array([kinds.index(text) for text in local.texts])
        return jnp.stack(each)[which[self._rank()]]

    def _rank(self) -> Any:
        return lax.axis_index(self.axes)

    def _verb(self, verb: Verb, values: Arrays) -> Any:
        params = {key: pick(value, 0) for key, value in verb.params}
        done = VERBS[verb.verb](values[verb.arg], verb.axis or "ranks", **params)
        return done if verb.recorded else lax.stop_gradient(done)

    def loss(self, terms: tuple[Term, ...], values: Arrays, grads: Arrays | None = None) -> Any:
        """The sum of the ranks' losses; what does not vary over an axis is counted once."""
        total: Any = jnp.zeros(())
        for term in terms:
            name = term.arg.removeprefix("grad ")
            source = values if name == term.arg else grads
            if source is None:
                raise ValueError(term.arg)
            seen = set()
            for rank, text in enumerate(term.texts):
                place = self.place(name, rank)
                if text is None or place in seen or (name != term.arg and not self.requires(name)[rank]):
                    continue
                seen.add(place)
                total = total + evaluated(text, source[name][place]) * (1 + rank if term.weighted else 1)
        return total

    def requires(self, name: str) -> tuple[bool, ...]:
        """Whether a leaf requires grad, on each rank."""
        return next(leaf.requires for leaf in self.program.leaves if leaf.name == name)

    def everything(self, leaves: Arrays, tangents: Arrays) -> dict[str, Arrays]:
        """What the ranks return, by what it says about a variable."""
        mode, losses = self.program.mode, self.program.losses
        if "forward" not in mode:
            out = {"": self.variables(leaves)}
        else:
            out = dict(zip(("", "tangent of "), jax.jvp(self.variables, (leaves,), (tangents,)), strict=True))
        if mode == "forward":
            return out

        def gradient(objective: Callable[[Arrays], Any]) -> Callable[[Arrays], Arrays]:
            # Of a complex variable JAX has the conjugate of what torch calls the gradient.
            return lambda at: jax.tree.map(jnp.conj, jax.grad(objective)(at))

        def objective(at: Arrays) -> Any:
            if mode != "reverse over forward":
                return self.loss(losses[0], self.variables(at))
            return self.loss(losses[0], jax.jvp(self.variables, (at,), (tangents,))[1])

        if mode == "forward over reverse":
            primal, tangent = jax.jvp(gradient(objective), (leaves,), (tangents,))
            return {**out, "grad1 ": primal, "tangent of grad ": tangent}
        for order in range({"second": 1, "third": 2}.get(mode, 0)):
            taken = gradient(objective)
            out[f"grad{order + 1} "] = taken(leaves)
            objective = self._next(losses[order + 1], taken)
        return {**out, "grad ": gradient(objective)(leaves)}

    def _next(self, terms: tuple[Term, ...], taken: Callable[[Arrays], Arrays]) -> Callable[[Arrays], Any]:
        return lambda at: self.loss(terms, self.variables(at), taken(at))


def _made(program: Program, packed: dict[str, tuple[tuple[int, ...], list[Any]]]) -> Arrays:
    dtype = jnp.complex128 if program.dtype.startswith("complex") else jnp.float64
    return {name: jnp.array(numbers, dtype).reshape(shape) for name, (shape, numbers) in packed.items()}


def outcomes(job: Job) -> list[dict[str, Any]]:
    """What every rank has to return, each tensor as (shape, numbers)."""
    run = _Run(job)
    leaves, tangents = (_made(run.program, job[key]) for key in ("leaves", "tangents"))
    out: list[dict[str, Any]] = [{} for _ in range(run.program.ranks)]
    for prefix, values in jax.jit(run.everything)(leaves, tangents).items():
        for name, value in values.items():
            array = np.asarray(value)
            for rank, own in enumerate(out):
                one = array[run.place(name, rank)]
                wanted = "grad" not in prefix or run.requires(name)[rank]
                own[prefix + name] = (one.shape, one.ravel().tolist()) if wanted else None
    return out


def main() -> None:
    """Run the programs that are handed in as a file, and write what came of each."""
    jax.config.update("jax_enable_x64", True)
    with open(sys.argv[1], "rb") as file:
        jobs: list[Job] = pickle.load(file)
    results: list[Any] = []
    for job in jobs:
        try:
            results.append(outcomes(job))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    with open(sys.argv[2], "wb") as file:
        pickle.dump(results, file)


if __name__ == "__main__":
    main()
