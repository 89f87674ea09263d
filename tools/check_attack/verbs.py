"""Random programs of the library's own verbs as scripts that train, for `gradmesh check`, and a fault in them.

The programs are those of `tools.attack`, each of which a dense run proves right: here those whose leaves are each
rank's own, so that their gradients are those of the sum of the ranks' losses. The fault is a result said to be of type
I, where each rank uses it in its own way: then the gradient is a part of the true one, or too large.

$ python -m tools.check_attack.verbs --programs 100 --seed 1
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from gradmesh.checker.findings import Verdict
from gradmesh.checker.run import Target, check_script
from tools.attack.calls import HELPERS, Leaf, Region, Verb
from tools.attack.draw import drawn
from tools.attack.meanings import Invalid
from tools.attack.programs import HEADER, Program, source
from tools.attack.run import Failure, Pools, judged
from tools.pages import parser_of

MODES = ("first", "second")
_SCRIPT = """{header}
held = []

def leaf(seed, shape, dtype=torch.float64, grad=True, plain=leaf):
    x = torch.nn.Parameter(plain(seed, shape, dtype, False), grad)
    if grad: held.append(x)
    return x

{helpers}
{source}
gm.init("gloo")
torch.manual_seed(gm.rank())
own = torch.nn.Parameter(torch.randn(2))  # a step has a parameter on every rank
for step in range(2):
    held.clear()
    own.grad = None
    own.square().sum().backward()
    on_each_rank()
    torch.optim.SGD([*held, own], lr=0.1).step()
"""


def _flat(program: Program) -> list[Leaf | Verb]:
    inside = [s.body if isinstance(s, Region) else (s,) for s in program.statements]
    return [one for body in inside for one in body if isinstance(one, Leaf | Verb)]


def suited(program: Program) -> bool:
    """Whether its gradients are those of the sum of the ranks' losses, and may be followed."""
    if program.mesh or program.mode not in MODES or not (program.ordered or program.paired):
        return False
    for one in _flat(program):
        if isinstance(one, Leaf) and one.kind != "V":
            return False
        if isinstance(one, Verb) and any(value == "I" or "dtype" in key for key, value in one.params):
            return False
    return True


def script(program: Program) -> str:
    """A script whose every step takes the program's gradients."""
    return _SCRIPT.format(header=HEADER, helpers="".join(HELPERS.values()), source=source(program))


def faulty(program: Program) -> Program | None:
    """The same with one replicated result said to be invariant; None if it has none.

    Of first derivatives alone: what a gradient with a fault is used for is another objective, whose own gradient is
    right.
    """
    if program.mode != "first":
        return None
    for at, statement in enumerate(program.statements):
        if isinstance(statement, Verb) and dict(statement.params).get("dst") == "R" and not statement.way:
            params = tuple((key, "I" if key == "dst" else value) for key, value in statement.params)
            changed = replace(statement, params=params)
            return replace(
                program, statements=(*program.statements[:at], changed, *program.statements[at + 1 :])
            )
    return None


@dataclass(frozen=True)
class Outcome:
    """What the check said of a program, or of one with the fault."""

    index: int  # of the program
    wrong: bool  # whether its gradients are not those of the program as it was drawn
    verdict: Verdict  # the check's

    @property
    def errors(self) -> list[str]:
        """The rules of the errors that were found."""
        return [each.rule.id for each in self.verdict.findings if each.severity == "error"]

    @property
    def kind(self) -> str:
        """What that is: right or accused, found or missed, or not followed, which a note says."""
        if self.wrong:
            return "found" if self.errors else "not followed" if self.verdict.notes else "missed"
        return "accused" if self.errors else "not followed" if self.verdict.notes else "right"


def outcomes(seed: int, count: int, folder: Path) -> Iterator[Outcome]:
    """What is said of the first suited programs of a seed, and of each with the fault."""
    index = -1
    with Pools("threads") as pools:
        while count:
            index += 1
            program = drawn(seed, index)
            if not suited(program) or not _runs(program, pools):
                continue
            count -= 1
            yield Outcome(index, False, _checked(program, folder / f"{seed}_{index}.py"))
            changed = faulty(program)
            if changed is not None and (gradients := _gradients(changed, pools)):
                wrong = gradients != _gradients(program, pools)
                yield Outcome(index, wrong, _checked(changed, folder / f"{seed}_{index}_faulty.py"))


def _checked(program: Program, file: Path) -> Verdict:
    file.write_text(script(program))
    return check_script(Target(str(file)), ranks=program.ranks)


def _runs(program: Program, pools: Pools) -> bool:
    """Whether it is a program, and comes out as its dense run."""
    try:
        return judged(program, pools).kind == "right"
    except Invalid:
        return False


def _gradients(program: Program, pools: Pools) -> list[object]:
    """The gradients of each rank, in few digits; none where it does not run."""
    results: list[object] = []
    for outcome in pools.run(program):
        if isinstance(outcome, Failure):
            return []
        kept = [x for name, x in outcome.items() if name.startswith("grad ")]
        results += [None if x is None else _rounded(x) for x in kept]
    return results


def _rounded(x: Tensor) -> object:
    parts = torch.view_as_real(x) if x.is_complex() else x
    return [f"{value:.6g}" for value in parts.flatten().tolist()]


def main() -> int:
    """Attack, and say what came of it."""
    parser = parser_of(__doc__)
    parser.add_argument("--programs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="the folder to leave the scripts in")
    parsed = parser.parse_args()
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = parsed.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for outcome in outcomes(parsed.seed, parsed.programs, folder):
            counts[outcome.kind] = counts.get(outcome.kind, 0) + 1
            if outcome.kind in ("accused", "missed"):
                print(f"{outcome.kind}: {parsed.seed} {outcome.index} {outcome.errors}", flush=True)
    print(", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())))
    return int(bool(counts.get("accused") or counts.get("missed")))


if __name__ == "__main__":
    sys.exit(main())
