"""The tests of devices, overlap and a benchmark, on NVIDIA GPUs or on the simulated device of the tests.

    python -m tools.gpu --device cuda --slow  # what `make gpu` runs; writes docs/reports/gpu.json, gpu.md and the table
    python -m tools.gpu --device simulated    # the same commands where there is no GPU
    python -m tools.report docs/reports/gpu.md --device cuda

One rank runs on each GPU. With one GPU, two ranks share it. Without a GPU it says so and exits with 1, and nothing is
written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "docs" / "reports" / "gpu.json", ROOT / "docs" / "reports" / "gpu.md"
DEVICES = "cuda", "simulated"
NAMES = {"cuda": "NVIDIA GPUs over NCCL", "simulated": "the simulated device over Gloo"}

TESTS = {
    "laws": ("tests/test_device_programs.py", "law or every_op or few_ops"),
    "programs": (
        "tests/test_device_programs.py",
        "(derivatives or late or sizes or complex or captured) and not layers and not any_program and not every_op",
    ),
    "layers": ("tests/test_device_programs.py", "layers or any_program"),
    "async": ("tests/test_device_async.py", ""),
    "mismatches": ("tests/test_deferred_check.py", "not more_random"),
    "attention": ("tests/test_attention_kernels.py", ""),
    "streams": ("tests/test_gpus.py", ""),
}
"""The file of each section, and what selects in it beside the mark `device`."""

STATUS = {
    "values and every derivative of the verbs (laws)": ("tested", "laws"),
    "verbs, `gm.ordered`, `gm.coalesce`, `gm.no_sync`, `gm.objective`, CUDA graphs: two derivatives, waits": (
        "tested",
        "programs",
    ),
    "layers of `gm.nn`: the same": ("tested", "layers"),
    "`async_op=True`: lifetimes, writes before `wait()`": ("tested", "async"),
    "overlap of work and calls": ("tested", "overlap"),
    "mismatched calls raise on every rank": ("at every call", "mismatches"),
    "fused attention kernels (elsewhere: stand-ins with their signatures)": ("tested", "attention"),
    "side streams, CUDA sanitizer, compiler, autocast, a hang (elsewhere: some of them on a CPU)": (
        "",
        "streams",
    ),
    "cost beside the group's own calls": ("[measured](reports/bench.md)", "benchmark"),
}
"""What is claimed: how on CPUs, and the section that shows it on a device."""


# ---- sections


def tests_of(section: str, device: str, every: bool) -> dict[str, Any]:
    """Run the tests of a section; how many passed, failed and were not run, and why."""
    file, words = TESTS[section]
    marks = "device" if every else "device and not slow"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", file, "-m", marks, "-k", words, f"--junitxml={report}"]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "GRADMESH_TEST_DEVICE": device},
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists():
            return {"passed": 0, "failed": 1, "not run": 0, "reasons": [done.stderr[-400:]]}
        return counts_in(report.read_text())


def counts_in(report: str) -> dict[str, Any]:
    """The figures of a report of pytest's."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    skipped = [found for case in cases if (found := case.find("skipped")) is not None]
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    reasons = {found.get("message", "") for found in skipped} | {
        f"failed: {_failure(case)}" for case in failed
    }
    passed = len(cases) - len(skipped) - len(failed)
    return {"passed": passed, "failed": len(failed), "not run": len(skipped), "reasons": sorted(reasons)}


def _failure(case: ElementTree.Element) -> str:
    """The name of a test, and the first line of what it says."""
    found = next(each for kind in ("failure", "error") if (each := case.find(kind)) is not None)
    said = (found.get("message") or "").partition("\n")[0][:200]
    return f"{case.get('name')}: {said}" if said else str(case.get("name"))


def overlap() -> dict[str, dict[str, float]]:
    """Seconds of two programs on this rank: their work, their calls, and both."""
    from tests import test_device_async as programs

    made = {"chain": programs.chain, "ring attention": programs.attention}
    return {name: programs.seconds_of(program) for name, program in made.items()}


def benchmark(sizes: Sequence[int], repeats: int = 20) -> dict[str, dict[str, float]]:
    """Microseconds of verbs on this rank, and of the group's own calls with the same operands.

    Each until the device is done, and on the host alone, until the call is queued.
    """
    from tests import simulated_device as sd

    group, count = gm.axis().group, gm.world_size()
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    found = {}
    for size in sizes:
        device = "cuda" if sd.ON_CUDA else sd.NAME
        x = torch.ones(size // 4 * count, device=device)
        part, own = x[: size // 4].clone(), x.clone()
        raw: dict[str, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, own, group=group),
            "all_gather": partial(_into, gather, x, part, group),
            "reduce_scatter": partial(_into, scatter, part, x, group),
        }
        verbs: dict[str, Callable[[], object]] = {
            "all_reduce": partial(gm.all_reduce, x, dst=gm.R),
            "all_gather": partial(gm.all_gather, part),
            "reduce_scatter": partial(gm.reduce_scatter, x),
        }
        for name in raw:
            calls = {"own": raw[name], "gradmesh": verbs[name]}
            times: dict[str, list[float]] = {f"{way}{end}": [] for way in calls for end in ("", ", queued")}
            for number in range(repeats + 3):
                for way, call in calls.items():
                    torch.accelerator.synchronize()
                    started = time.perf_counter()
                    call()
                    queued = time.perf_counter()
                    torch.accelerator.synchronize()
                    if number >= 3:
                        times[way].append(1e6 * (time.perf_counter() - started))
                        times[f"{way}, queued"].append(1e6 * (queued - started))
            found[f"{name}, {size} bytes"] = {way: statistics.median(each) for way, each in times.items()}
    return found


def _into(call: Callable[..., object], like: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    call(torch.empty_like(like), x, group=group)


def _measured(program: Callable[..., Any], *args: Any, default: bool = True) -> Any:
    from tests import simulated_device as sd
    from tests.simulated_device import cuda

    ranks = max(2, cuda.count()) if sd.ON_CUDA else 2
    found = gm.launch(_on_rank, ranks, backend=sd.POOL, args=(default, program, *args), timeout=600)
    return {
        name: {way: max(rank[name][way] for rank in found) for way in found[0][name]} for name in found[0]
    }


def _on_rank(default: bool, program: Callable[..., Any], *args: Any) -> Any:
    from tests import simulated_device as sd

    return sd.on_device(program, *args, default=default)


def why_not(device: str) -> str:
    """A sentence that says why the device is not here; empty: it is."""
    if device == "cuda":
        return "" if torch.cuda.is_available() else "No NVIDIA GPU was found, so nothing was run."
    from tests import simulated_device as sd

    return "" if (reason := sd.why_not()) is None else f"The simulated device is not available: {reason}."


# ---- pages


def machine(device: str) -> dict[str, Any]:
    """Where it runs."""
    on_gpus = device == "cuda"
    gpus = torch.cuda.device_count()
    ranks = max(2, gpus) if on_gpus else 2
    what = torch.cuda.get_device_name() if on_gpus else "simulated device"
    shared = {"gpus": gpus} if on_gpus else {}
    return {
        "torch": torch.__version__,
        "device": what,
        "ranks": ranks,
        **shared,
        "date": time.strftime("%Y-%m-%d"),
    }


def results() -> dict[str, Any]:
    """What was run last on each device."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def cell(found: dict[str, Any], section: str) -> str:
    """The status of a section on a device."""
    part = found.get(section)
    if part is None:
        return "not run"
    if section == "overlap":
        most = max(each["both"] / max(each["work"], each["calls"]) for each in part.values())
        return f"{most:.2f} times the longer of both"
    if section == "benchmark":
        most = statistics.median(each["gradmesh"] / each["own"] for each in part.values())
        return f"{most:.2f} times theirs"
    if part["failed"]:
        return f"**{part['failed']} of {part['passed'] + part['failed']} tests fail**"
    if not part["passed"]:
        return "not run"
    passes = "test passes" if part["passed"] == 1 else "tests pass"
    return f"{part['passed']} {passes}" + (f", {part['not run']} not run" if part["not run"] else "")


def table(found: dict[str, Any]) -> str:
    """What holds on CPUs, on the simulated device and on GPUs."""
    lines = ["| | CPU | simulated device | GPU |", "|---|---|---|---|"]
    for claim, (on_cpu, section) in STATUS.items():
        cells = (cell(found.get(device, {}), section) for device in ("simulated", "cuda"))
        lines.append(f"| {claim} | {on_cpu} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(found: dict[str, Any]) -> str:
    """The page."""
    parts = [
        "# GPUs and the simulated device: what was run",
        "The tests that hold on any device, overlap, and the cost of verbs beside the group's own calls. "
        "`make gpu` runs them on NVIDIA GPUs, "
        "`python -m tools.report docs/reports/gpu.md --device simulated` on the "
        "[simulated device](../gpus.md#the-simulated-device).",
        table(found).replace("](reports/", "]("),
    ]
    for device in DEVICES:
        ran = found.get(device)
        parts.append(f"## On {NAMES[device]}")
        if not ran:
            parts.append("Not run.")
            continue
        where: dict[str, list[str]] = {}
        for section, at in ran["machines"].items():
            on = f" on {at['gpus']} GPU" if at.get("gpus", at["ranks"]) < at["ranks"] else ""
            ranks = f"{at['device']}, {at['ranks']} ranks{on}, torch {at['torch']}, {at['date']}"
            where.setdefault(ranks, []).append(section)
        parts.append("\n".join(f"* {', '.join(sections)}: {at}." for at, sections in where.items()))
        rows = [(name, ran[name]) for name in TESTS if name in ran]
        lines = ["| tests | passed | failed | not run | |", "|---|---|---|---|---|"]
        for name, each in rows:
            why = "; ".join(each["reasons"]).replace("|", " ").replace("\n", " ")
            lines.append(f"| {name} | {each['passed']} | {each['failed']} | {each['not run']} | {why} |")
        parts.append("\n".join(lines))
        if "overlap" in ran:
            lines = [
                "| ms | work | calls | both | one after another | both / the longer |",
                "|---|---|---|---|---|---|",
            ]
            for name, times in ran["overlap"].items():
                ways = (f"{1e3 * times[way]:.0f}" for way in ("work", "calls", "both", "one after another"))
                ratio = times["both"] / max(times["work"], times["calls"])
                lines.append(f"| {name}, forward and backward | {' | '.join(ways)} | {ratio:.2f} |")
            parts.append("\n".join(lines))
            parts.append(
                "In ring attention nothing is left to compute while the last call brings home the gradients of keys "
                "and values."
            )
        if "benchmark" in ran:
            lines = [
                "| us | the group's own call | gradmesh | the host's part: own | gradmesh |",
                "|---|---|---|---|---|",
            ]
            columns = ("own", "gradmesh", "own, queued", "gradmesh, queued")
            lines += [
                f"| {name} | {' | '.join(f'{times[way]:.0f}' for way in columns)} |"
                for name, times in ran["benchmark"].items()
            ]
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Run on a device, and write the results, the page and the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--only", action="append", help="a section; all by default")
    parser.add_argument("--slow", action="store_true", help="the long form of the tests too")
    parser.add_argument("--render", action="store_true", help="write the page of what was run before")
    given = parser.parse_args(arguments)
    found = results()
    if not given.render:
        if reason := why_not(given.device):
            print(reason, file=sys.stderr)
            return 1
        os.environ["GRADMESH_TEST_DEVICE"] = given.device
        ran = {**found.get(given.device, {})}
        ran["machines"] = {**ran.get("machines", {})}
        sizes = (4096, 1 << 20, 1 << 26) if given.device == "cuda" else (4096, 1 << 18)
        for section in given.only or [*TESTS, "overlap", "benchmark"]:
            if section in TESTS:
                ran[section] = tests_of(section, given.device, given.slow)
            else:
                ran[section] = (
                    _measured(overlap)
                    if section == "overlap"  # a default device costs each operator some microseconds
                    else _measured(benchmark, sizes, default=False)
                )
            ran["machines"][section] = machine(given.device)
            print(f"{section}: {cell(ran, section)}", flush=True)
            found[given.device] = ran
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    (into or PAGE).write_text(page(found))
    from tools import generate

    generate.main([])
    failed = [name for name in TESTS if found.get(given.device, {}).get(name, {}).get("failed")]
    return int(bool(failed))


if __name__ == "__main__":
    from tools import gpu  # whose functions the ranks can import

    sys.exit(gpu.main())
