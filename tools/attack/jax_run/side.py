"""Programs under JAX, as its own interpreter runs them: `jax.shard_map` over host devices, differentiated by JAX.

JAX follows by itself over which axes a value varies, and here it has to come to the same types.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from tools.attack.calls import Verb, pick
from tools.attack.jax_run.verbs import VERBS, evaluated
from tools.attack.programs import Leaf, Local, Program, Region, Term

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
        flat: list[Any] = []
        for statement in self.program.statements:
            flat += statement.body if isinstance(statement, Region) else [statement]
        for statement in flat:
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
