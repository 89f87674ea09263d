"""Audit the collectives of gradmesh and of other libraries: python -m tools.report docs/reports/audits.md.

Of torch: `torch.distributed.nn.functional`; the functional collectives, of which the differentiable ones live in the
private module `torch.distributed._functional_collectives`; and DTensor's redistribute. `spmd_types` where it is
installed, see `benchmarks/requirements.txt`.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import gradmesh as gm
from gradmesh.verify import Audit, audit
from gradmesh.verify.auditing.findings import table as kinds_table
from tools.audit_cases import SYSTEMS, Build, drop_ins
from tools.audit_plans import plans

_HEAD = """# Audits of collectives: gradmesh, torch.distributed, DTensor and others

What `gm.verify.audit` finds in the collectives of gradmesh and of other libraries, and what each kind of finding means.
`audit` runs a collective, `autograd.Function` or layer on a few ranks (threads of one process) and reports for which
types its backward is the adjoint of its forward, and which faults it has:

```python
import torch
import torch.distributed as dist
import gradmesh as gm

class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad)
        return grad

def build():
    return Sum.apply, torch.randn(4, 3)

found = gm.verify.audit(build)
print(found.arrows)
print(found.kinds[0], found.findings[0].ranks)
```

```text
('P -> R',)
gradient-overwritten (0, 1, 2)
```

`build` may accept `group=`, `parts=` and `local_rank=`. `arrow="P -> R"` checks one intended pair of types. On the
command line, `gradmesh audit module:build` prints the full report; its exit status is 0 without errors and warnings, 1
with one, and 2 if the function could not be audited.

An arrow such as `V -> R` gives the [types](../types.md) of operand and result: here the operand varies over the ranks,
and the result is the same on each rank, which uses it differently. Arrows that follow from stronger ones are left out.

## Kinds of findings
"""

_RESULTS = """
## Findings

torch {torch}, Python {python}, {cores} cores, 2 ranks on threads, in float64, {seconds:.0f} s in all. Written by

```console
$ python -m tools.report docs/reports/audits.md
```

Each call is made as its documentation says, see `benchmarks/systems/peers.py`; results that only the root has are
judged on the root. The functional collectives with a backward are in a private module of torch,
`torch.distributed._functional_collectives`. `unused-output` is tested inside `gm.ordered()`, which has no effect on raw
collectives. Subgroups consist of ranks 1 and 2 of three.
"""


def audits(timeout: float = 20.0) -> dict[str, dict[str, Audit | str]]:
    """For each system, what is found of each of its calls, or why it could not be audited."""
    systems = {
        "gradmesh": SYSTEMS["gradmesh"],
        "gradmesh.nn.graph, the plans": plans(),
        "gradmesh.compat, the drop-ins": drop_ins(),
        **SYSTEMS,
    }
    found: dict[str, dict[str, Audit | str]] = {}
    for name, calls in systems.items():
        if name in found or (name == "spmd_types" and importlib.util.find_spec(name) is None):
            continue
        found[name] = {}
        for call, build in calls.items():
            found[name][call] = _one(build, timeout)
            print(f"{name:32} {call:56} {_short(found[name][call])}", file=sys.stderr, flush=True)
    return found


def _one(build: Build, timeout: float) -> Audit | str:
    try:
        return audit(build, world_size=2, timeout=timeout)
    except gm.GradmeshError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        reason = next(
            (line.removeprefix("got").strip() for line in lines if line.startswith("got")), lines[0]
        )
        return reason.rpartition(", at ")[0] or reason


def _short(found: Audit | str) -> str:
    if isinstance(found, str):
        return f"raises: {found}"
    return f"{'; '.join(found.arrows)} | {', '.join(found.kinds) or 'none'} | {found.seconds:.1f} s"


def page(found: dict[str, dict[str, Audit | str]], seconds: float) -> str:
    """The page, with what was found."""
    head = _RESULTS.format(
        torch=torch.__version__,
        python=platform.python_version(),
        cores=torch.get_num_threads(),
        seconds=seconds,
    )
    lines = [_HEAD, kinds_table(), head]
    for name, calls in found.items():
        clean = sum(isinstance(each, Audit) and each.ok for each in calls.values())
        lines += [f"### {name}: {clean} of {len(calls)} without a finding", ""]
        lines += ["| call | backward is the adjoint for | findings |", "|---|---|---|", *_rows(calls), ""]
    return "\n".join(lines)


def _rows(calls: dict[str, Audit | str]) -> list[str]:
    rows = []
    for call, each in calls.items():
        if isinstance(each, str):
            rows.append(f"| `{call}` | | raises: {each.replace('|', '/')[:160]} |")
            continue
        kinds = ", ".join(f"`{kind}`" for kind in each.kinds) or "none"
        rows.append(f"| `{call}` | {'; '.join(each.arrows) or 'none'} | {kinds} |")
    return rows


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Audit everything; the exit status says whether something of gradmesh has a finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds that one question may take")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    began = time.monotonic()
    found = audits(options.timeout)
    text = page(found, time.monotonic() - began)
    if into is None:
        print(text)
    else:
        into.write_text(text)
    own = [each for name, calls in found.items() if name.startswith("gradmesh") for each in calls.values()]
    return int(not all(isinstance(each, Audit) and each.ok for each in own))


if __name__ == "__main__":
    sys.exit(main())
