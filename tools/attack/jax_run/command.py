"""The comparison as a whole: programs on gradmesh's ranks and under JAX, what they agree in counted."""

from __future__ import annotations

import argparse
import collections
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradmesh as gm
from tools.attack.calls import Region, Verb, pick
from tools.attack.dense import Dense, expected
from tools.attack.draw import drawn
from tools.attack.meanings import Invalid
from tools.attack.programs import Program, script
from tools.attack.run import Failure, Pools, compared

_ROOT = Path(__file__).parents[3]


def _settings() -> dict[str, str]:
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_ROOT)}


def _even(verb: Verb, ranks: int) -> bool:
    """Whether no sizes are passed, or equal ones."""
    passed = [pick(value, rank) for key, value in verb.params if "sizes" in key for rank in range(ranks)]
    return all(sizes == "auto" or len(set(sizes)) == 1 for sizes in passed)


def verbs_of(python: str) -> frozenset[str]:
    """The verbs that the other side has; none if the interpreter has no JAX."""
    code = "from tools.attack.jax_run.side import VERBS; print(*VERBS)"
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
    verbs_called = [one for one in program.flat if isinstance(one, Verb)]
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


ALLOWED = 1e-10
"""How far a value may be from JAX's, relative to the largest entry, or to 1."""

MISSING = """\
{python} has no JAX. Make an environment with it, and name its interpreter:
    python3 -m venv .venv-jax && .venv-jax/bin/pip install "jax[cpu]"
    python -m tools.attack.jax_run --jax-python .venv-jax/bin/python"""

_AT_ONCE = 100
"""Programs that one process of JAX runs; it keeps what it compiled."""


@dataclass
class Comparison:
    """What came of the programs."""

    # programs that agree, by the derivatives they take
    modes: collections.Counter[str] = field(default_factory=collections.Counter)
    verbs: collections.Counter[str] = field(default_factory=collections.Counter)  # verbs in them
    values: int = 0  # tensors that were compared
    farthest: float = 0.0  # the largest difference, relative to the largest entry or to 1
    findings: list[str] = field(default_factory=list)  # programs that do not agree
    seconds: float = 0.0  # how long it took

    def __str__(self) -> str:
        lines = ["| derivatives | programs equal |", "|---|---|"]
        lines += [f"| {mode} | {n} |" for mode, n in sorted(self.modes.items())]
        lines.append("verbs: " + ", ".join(f"{verb} {n}" for verb, n in sorted(self.verbs.items())))
        lines.append(
            f"{self.modes.total()} programs equal, {self.values} tensors, the farthest {self.farthest:.1e}; "
            f"{len(self.findings)} differ; {self.seconds:.0f} s"
        )
        return "\n".join(lines)


def _drawn(count: int, seed: int, start: int, verbs: Container[str]) -> Iterator[tuple[int, Program, Dense]]:
    """Programs that JAX can run, in double precision, ordered where the ranks differ, with the newer checkpoint."""
    index = start
    while count:
        program, number, index = drawn(seed, index), index, index + 1
        dtype = "float64" if program.dtype == "float32" else program.dtype
        ordered = program.ordered or (not program.paired and program.mode != "forward")
        statements = tuple(
            replace(one, reentrant=False) if isinstance(one, Region) else one for one in program.statements
        )
        program = replace(program, dtype=dtype, ordered=ordered, after=(), statements=statements)
        dense = Dense(program)
        try:
            for statement in program.statements:
                dense.step(statement)
            if expressible(program, dense, verbs):
                expected(program)
                count -= 1
                yield number, program, dense
        except Invalid:
            continue


def _farthest(own: dict[str, Tensor | None], right: dict[str, Tensor | None]) -> float:
    far = 0.0
    for name, value in right.items():
        got = own.get(name)
        if value is not None and got is not None and value.numel():
            far = max(far, ((got - value).abs().max() / value.abs().max().clamp(min=1)).item())
    return far


def _problem(program: Program, result: list[dict[str, Any]], pools: Pools, found: Comparison) -> str:
    """Run a program on gradmesh's ranks; what is wrong, or nothing."""
    right = [tensors(one, program.dtype) for one in result]
    missing = set(expected(program)[0]) - set(right[0])
    if missing:
        return f"JAX's side leaves out {sorted(missing)}"
    try:
        own = pools.run(program)
    except gm.RankError as error:
        return str(error)
    raised = [str(one) for one in own if isinstance(one, Failure)]
    if raised:
        pools.end(program.ranks)
        return raised[0]
    verdict = compared(own, right, program.dtype, ALLOWED)
    if verdict.kind == "right":
        found.values += sum(len(one) for one in right)
        found.farthest = max(found.farthest, *(_farthest(*pair) for pair in zip(own, right, strict=True)))  # type: ignore[arg-type]
        return ""
    return f"{verdict.kind}: {verdict.what}\n{verdict.detail}"


def compare(
    programs: int, python: str, *, seed: int = 0, start: int = 0, backend: str = "threads"
) -> Comparison:
    """Run programs on gradmesh's ranks and under JAX."""
    begin, found = time.monotonic(), Comparison()
    chosen = _drawn(programs, seed, start, verbs_of(python))
    with Pools(backend) as pools:
        while some := list(islice(chosen, _AT_ONCE)):
            results = under_jax([job(program, dense) for _, program, dense in some], python)
            for (number, program, _), result in zip(some, results, strict=True):
                problem = result if isinstance(result, str) else _problem(program, result, pools, found)
                if problem:
                    parsed = f"program {number}: {problem}"[:4000].splitlines()[:30]
                    found.findings.append("\n".join(f"# {line}" for line in parsed) + "\n" + script(program))
                    continue
                found.modes[program.mode] += 1
                found.verbs.update(one.verb for one in program.flat if isinstance(one, Verb))
    found.seconds = time.monotonic() - begin
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the number of programs that differ decides the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.attack.jax_run", description="Hold gradmesh against JAX."
    )
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--jax-python", default=sys.executable, help="the interpreter that has JAX")
    parser.add_argument("--backend", default="threads", help="of gradmesh's ranks: threads, shm or gloo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the number of the first program")
    given = parser.parse_args(arguments)
    if not verbs_of(given.jax_python):
        print(MISSING.format(python=given.jax_python))
        return 2
    found = compare(
        given.programs, given.jax_python, seed=given.seed, start=given.start, backend=given.backend
    )
    for finding in found.findings[:10]:
        print(finding, flush=True)
    print(found)
    return 1 if found.findings else 0
