"""The comparison with JAX. What needs JAX is run where GRADMESH_JAX_PYTHON names an interpreter that has it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from gradmesh.ops.all_gather import AllGather
from gradmesh.ops.base import LinearOp
from gradmesh.ops.shard import ShardReplicated
from tools.attack.calls import Leaf, PerRank, Verb
from tools.attack.dense import Dense
from tools.attack.jax_run.command import compare, expressible, main
from tools.attack.programs import Program

PYTHON = os.environ.get("GRADMESH_JAX_PYTHON", "")
needs_jax = pytest.mark.skipif(not PYTHON, reason="GRADMESH_JAX_PYTHON names no interpreter")

EVEN = Leaf("a", 1, ((2, 1), (2, 1)), "V", (True, True))
GATHER = Verb("b", "all_gather", "a", "", (("dim", 0), ("dst", "R")))


def can_run(leaf: Leaf, verb: Verb, mode: str = "first") -> bool:
    program = Program(2, False, "float64", mode, False, True, (leaf, verb))
    dense = Dense(program)
    for statement in program.statements:
        dense.step(statement)
    return expressible(program, dense, ("all_gather", "reduce_scatter", "permute", "halo_exchange"))


def test_jax_gets_only_supported_calls() -> None:
    assert can_run(EVEN, GATHER)
    assert not can_run(EVEN, replace(GATHER, verb="scan", params=(("reverse", False),)))
    assert not can_run(EVEN, replace(GATHER, way="vmap 1"))
    assert not can_run(EVEN, replace(GATHER, params=(*GATHER.params, ("comm_dtype", "float32"))))
    assert not can_run(replace(EVEN, shapes=((0, 1), (0, 1))), GATHER)
    sizes = (*GATHER.params, ("sizes", PerRank(((2, 1), (2, 1)))))
    assert not can_run(replace(EVEN, shapes=((2, 1), (1, 1))), replace(GATHER, params=sizes))
    assert can_run(EVEN, replace(GATHER, recorded=False))
    assert not can_run(EVEN, replace(GATHER, recorded=False), "forward")
    open_end = (("dim", 0), ("halo", (1, 1)), ("wrap", False))
    assert not can_run(EVEN, replace(GATHER, verb="halo_exchange", params=open_end))


def test_missing_jax_error_names_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--jax-python", "no-such-interpreter"]) == 2
    assert 'pip install "jax[cpu]"' in capsys.readouterr().out


@needs_jax
def test_programs_are_equal_to_those_of_jax() -> None:
    found = compare(30, PYTHON, seed=4)
    assert not found.findings, found.findings[0]
    assert found.modes.total() == 30
    assert 0 < found.farthest < 1e-10


@needs_jax
def test_a_wrong_adjoint_is_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_sum(self: AllGather) -> LinearOp:
        return ShardReplicated(self.axis, self.dim, self.sizes, **self.swapped)

    monkeypatch.setattr(AllGather, "adjoint", property(without_the_sum))
    assert any("wrong: grad" in finding for finding in compare(60, PYTHON, seed=4).findings)
