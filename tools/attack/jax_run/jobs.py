"""Which programs JAX can run, what its process needs for it, and what comes back."""

from __future__ import annotations

import os
import pickle
import subprocess
import tempfile
from collections.abc import Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.attack.calls import Verb, pick
from tools.attack.dense import Dense
from tools.attack.programs import Program, Region

_ROOT = Path(__file__).parents[3]


def _settings() -> dict[str, str]:
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_ROOT)}


def flat(program: Program) -> Iterator[Any]:
    """All statements."""
    for statement in program.statements:
        yield from statement.body if isinstance(statement, Region) else (statement,)


def _even(verb: Verb, ranks: int) -> bool:
    """Whether no sizes are passed, or equal ones."""
    passed = [pick(value, rank) for key, value in verb.params if "sizes" in key for rank in range(ranks)]
    return all(sizes == "auto" or len(set(sizes)) == 1 for sizes in passed)


def verbs_of(python: str) -> frozenset[str]:
    """The verbs that the other side has; none if the interpreter has no JAX."""
    code = "from tools.attack.jax_run.verbs import VERBS; print(*VERBS)"
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=False, env=_settings()
        )
    except OSError:  # no such interpreter
        return frozenset()
    return frozenset(done.stdout.split())


def expressible(program: Program, dense: Dense, verbs: Container[str]) -> bool:
    """Whether JAX can run the program: one shape on all ranks, and verbs that it has."""
    if any(len({x.shape for x in value.tensors}) > 1 for value in dense.values.values()):
        return False
    if not all(
        x.numel() for leaf in dense.leaves.values() for x in leaf
    ):  # XLA ends on operands without elements
        return False
    verbs_called = [one for one in flat(program) if isinstance(one, Verb)]
    return all(_has(one, program, dense, verbs) for one in verbs_called)


def _has(verb: Verb, program: Program, dense: Dense, verbs: Container[str]) -> bool:
    params, shape = dict(verb.params), dense.values[verb.arg].tensors[0].shape
    ranks = len(program.groups(verb.axis)[0])
    if any(key.endswith("_dtype") for key in params):
        return False
    size = shape[int(params.get("split_dim", params.get("dim", 0)))]
    if verb.way or verb.verb not in verbs or not _even(verb, program.ranks):
        return False
    if verb.verb in ("all_to_all", "reduce_scatter", "shard") and size % ranks:
        return False
    if verb.verb == "halo_exchange" and (max(params["halo"]) > size or not params["wrap"]):
        return False
    if verb.verb in ("permute", "shift") and dense.values[verb.name].tensors[0].shape != shape:
        return False
    # torch.no_grad does not end a tangent, stop_gradient does.
    return verb.recorded or "forward" not in program.mode


def _packed(tensors: list[Tensor], kind: str) -> tuple[tuple[int, ...], list[Any]]:
    whole = torch.stack([x.detach() for x in (tensors[:1] if kind == "I" else tensors)])
    return tuple(whole.shape), whole.flatten().tolist()


def job(program: Program, dense: Dense) -> dict[str, Any]:
    """What the other side needs to run the program."""
    kinds = {leaf.name: leaf.kind for leaf in program.leaves}
    tangents = Dense(program)
    for leaf in program.leaves:
        tangents.step(replace(leaf, seed=leaf.seed + 50))
    return {
        "program": program,
        "types": {name: value.types for name, value in dense.values.items()},
        "leaves": {name: _packed(dense.leaves[name], kind) for name, kind in kinds.items()},
        "tangents": {name: _packed(tangents.leaves[name], kind) for name, kind in kinds.items()},
    }


def under_jax(jobs: list[dict[str, Any]], python: str) -> list[Any]:
    """What every rank has to return, by JAX; or what it raised."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "programs"), Path(folder, "results")
        given.write_bytes(pickle.dumps(jobs))
        subprocess.run(
            [python, "-m", "tools.attack.jax_run.side", str(given), str(made)],
            check=True,
            env=_settings(),
        )
        results: list[Any] = pickle.loads(made.read_bytes())
    return results


def tensors(outcome: dict[str, Any], dtype: str) -> dict[str, Tensor | None]:
    """What a rank has to return, as tensors."""
    made = getattr(torch, dtype)
    return {
        name: None if value is None else torch.tensor(value[1], dtype=made).reshape(value[0])
        for name, value in outcome.items()
    }
