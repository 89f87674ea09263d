"""Random programs against their dense runs, and the attack finds planted faults."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

import gradmesh as gm
from gradmesh.ops.all_gather import AllGather
from gradmesh.ops.base import LinearOp
from gradmesh.ops.mean import Mean
from gradmesh.ops.permute import Shift
from gradmesh.ops.scan import Scan
from gradmesh.ops.shard import ShardReplicated
from tests import simulated_device as sd
from tools.attack.calls import DERIVATIVES, STRUCTURES, VMAPS, Leaf, Local, Region, Verb
from tools.attack.command import attack, suspicious
from tools.attack.dense import expected
from tools.attack.draw import drawn
from tools.attack.meanings import MEANINGS, Invalid
from tools.attack.programs import MODES, Program, Term, script
from tools.attack.run import Failure, Pools, compared, judged, on_device

SEED = 1789


@pytest.fixture
def pools() -> Iterator[Pools]:
    with Pools("threads") as made:
        yield made


def meant(count: int, start: int = 0) -> Iterator[Program]:
    """Programs that are meant for the verbs."""
    index = start
    while count:
        program, index = drawn(SEED, index), index + 1
        try:
            expected(program)
        except Invalid:
            continue
        count -= 1
        yield program


def flat(program: Program) -> list[Leaf | Local | Verb]:
    return [
        inner for one in program.statements for inner in (one.body if isinstance(one, Region) else (one,))
    ]


WAITS_FOR_EVER = """
def on_each_rank():
    x = torch.ones(2)
    gm.recv(x, source=1) if gm.rank() == 0 else gm.send(x, to=0)  # the first one waits for both ranks
    if gm.rank() == 0:
        gm.recv(x, source=1)
    raise ValueError("on every rank")
"""


@pytest.mark.device
@pytest.mark.processes
def test_an_error_is_shown_although_a_kernel_waits_for_a_message() -> None:
    if reason := sd.why_not():
        pytest.skip(reason)
    for outcome in gm.launch(on_device, 2, backend=sd.POOL, args=(WAITS_FOR_EVER, 0.0), timeout=60):
        assert outcome == Failure("ValueError", False, "on every rank")


@pytest.mark.timeout(120)
def test_a_hundred_programs_are_right_or_refused(pools: Pools) -> None:
    summary = attack(100, pools, seed=SEED)
    assert not summary.findings, str(summary)
    assert summary.programs == 100
    right = sum(n for (_, kind), n in summary.counts.items() if kind == "right")
    assert right > 70, str(summary)


def test_they_have_every_verb_every_derivative_and_every_kind_of_mesh() -> None:
    verbs: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[object] = collections.Counter()
    for program in meant(300):
        verbs.update(one.verb for one in flat(program) if isinstance(one, Verb))
        kinds.update((program.mode, program.ranks, ("mesh", program.mesh), ("ordered", program.ordered)))
        kinds.update((program.dtype, ("paired", program.paired)))
        kinds.update(f"region {one.reentrant}" for one in program.statements if isinstance(one, Region))
        kinds.update("no grad" for one in flat(program) if isinstance(one, Verb) and not one.recorded)
        kinds.update(one.way for one in flat(program) if isinstance(one, Verb))
        kinds.update(key for one in flat(program) if isinstance(one, Verb) for key, _ in one.params)
        kinds.update("uneven" for leaf in program.leaves if len(set(leaf.shapes)) > 1)
        kinds.update("empty" for leaf in program.leaves if 0 in [shape[0] for shape in leaf.shapes])
    assert set(verbs) == set(MEANINGS)
    assert min(verbs.values()) >= 5
    wanted = {*MODES, 2, 3, 4, "float64", "complex128", "float32", "no grad", "uneven", "empty"}
    wanted |= {*DERIVATIVES, *STRUCTURES, *VMAPS, "comm_dtype", "backward_dtype"}
    wanted |= {"region True", "region False"} | {
        (w, b) for w in ("mesh", "ordered", "paired") for b in (True, False)
    }
    assert wanted <= set(kinds)


def _from_the_same_end(self: Scan) -> LinearOp:
    return replace(self, **self.swapped)


def _without_the_sum(self: AllGather) -> LinearOp:
    return ShardReplicated(self.axis, self.dim, self.sizes, **self.swapped)


def _not_divided(self: Mean) -> LinearOp:
    return self.op.adjoint


def _the_same_way(self: Shift) -> LinearOp:
    return replace(self, **self.swapped)


DEFECTS: dict[str, tuple[type[LinearOp], Callable[..., LinearOp]]] = {
    "an adjoint from the wrong end": (Scan, _from_the_same_end),
    "an adjoint that lacks a sum": (AllGather, _without_the_sum),
    "an adjoint that lacks a factor": (Mean, _not_divided),
    "an adjoint to the wrong rank": (Shift, _the_same_way),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_wrong_adjoint_is_found_and_shown_small(
    defect: str, pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, adjoint = DEFECTS[defect]
    monkeypatch.setattr(kind, "adjoint", property(adjoint))
    messages: list[str] = []
    summary = attack(400, pools, seed=SEED, start=25, most_findings=1, tell=messages.append)
    (finding,) = summary.findings
    assert finding.verdict.kind in ("wrong", "refused", "foreign error")
    assert "on_each_rank" in messages[0]
    assert len(flat(finding.program)) <= 5, messages[0]


def test_shown_program_runs_by_itself(pools: Pools, capsys: pytest.CaptureFixture[str]) -> None:
    for program in meant(8, start=40):
        if suspicious(program, judged(program, pools)) or judged(program, pools).kind != "right":
            continue
        exec(compile(script(program), "<script>", "exec"), {})
        said = capsys.readouterr().out.splitlines()
        assert len([line for line in said if line.startswith("0 ")]) == 1


def two_gathers(texts: tuple[str | None, str | None], *, ordered: bool) -> Program:
    """Two collectives of one shape; the second rank uses both."""
    return Program(
        ranks=2,
        mesh=False,
        dtype="float64",
        mode="first",
        ordered=ordered,
        paired=False,
        statements=(
            Leaf("a", 1, ((2, 1), (2, 1)), "V", (True, True)),
            Local("b", ("{0}.sin()", "{0}.sin()"), ("a",)),
            Verb("c", "all_gather", "a", "", (("dim", 0), ("dst", "R"))),
            Verb("d", "all_gather", "b", "", (("dim", 0), ("dst", "R"))),
        ),
        losses=(
            (Term((texts[0], "{0}.sum()"), "c", False), Term((texts[1], "({0} ** 2).sum()"), "d", False)),
        ),
    )


def test_a_program_that_is_not_joined_is_refused_and_inside_the_block_right(pools: Pools) -> None:
    unordered = two_gathers((None, "{0}.sum()"), ordered=False)
    assert judged(unordered, pools).kind.startswith("refused")
    assert judged(replace(unordered, ordered=True), pools).kind == "right"
    assert judged(two_gathers(("{0}.sum()", "{0}.sum()"), ordered=False), pools).kind == "right"


def test_error_counts_only_where_it_is_declared(pools: Pools) -> None:
    """A program whose ranks do alike, or that is ordered, has to be right."""
    program = two_gathers((None, "{0}.sum()"), ordered=False)
    verdict = judged(program, pools)
    assert not suspicious(program, verdict)
    assert suspicious(replace(program, paired=True), verdict)
    assert suspicious(replace(program, ordered=True), verdict)


def test_a_number_that_is_off_is_wrong() -> None:
    program = two_gathers(("{0}.sum()", "{0}.sum()"), ordered=False)
    dense = expected(program)
    assert compared([dict(one) for one in dense], dense, "float64").kind == "right"
    for rank in range(2):
        for name, value in dense[rank].items():
            assert value is not None
            for other in (value + 1e-6, value[:1], None):
                off = [dict(one) for one in dense]
                off[rank][name] = other
                assert compared(off, dense, "float64").kind == "wrong"


INVARIANT = Leaf("a", 1, ((2, 1), (2, 1)), "I", (True, True))


@pytest.mark.parametrize(
    "statement",
    [
        Local("b", ("{0}.sin()", "{0}.cos()"), ("a",)),
        Verb("b", "scan", "a", "", (("reverse", False),)),
        Verb("b", "shard", "a", "", (("dim", 0), ("src", "R"))),
    ],
)
def test_program_that_breaks_an_invariant_is_not_drawn(statement: Local | Verb) -> None:
    program = two_gathers(("{0}.sum()", "{0}.sum()"), ordered=False)
    with pytest.raises(Invalid):
        expected(replace(program, statements=(INVARIANT, statement, *program.statements[2:])))


def test_run_is_reproducible_and_resumes_from_a_given_start(pools: Pools) -> None:
    assert [drawn(3, index) for index in range(20)] == [drawn(3, index) for index in range(20)]
    first, second = attack(10, pools, seed=3), attack(10, pools, seed=3)
    assert first.counts == second.counts


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("backend", "programs"), [("threads", 10_000), ("shm", 1_000), ("gloo", 1_000)])
def test_many_programs_are_right_or_refused(backend: str, programs: int) -> None:
    with Pools(backend) as pools:
        summary = attack(programs, pools, seed=SEED + 1)
    assert not summary.findings, str(summary)
