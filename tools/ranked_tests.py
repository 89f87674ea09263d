"""Print what many tests on ranks take: gradients of the verbs, each of them a test of the plugin on its own.

    python -m tools.ranked_tests --tests 300 --ranks 4 --backend threads

pytest runs in a process of its own, and its start, with torch's, is counted.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

TESTS = """
import pytest, torch
import gradmesh as gm

VERBS = [
    lambda x: gm.all_gather(x),
    lambda x: gm.all_reduce(x, dst=gm.R),
    lambda x: gm.all_reduce(x, dst=gm.I) / gm.world_size(),
    lambda x: gm.reduce_scatter(x),
    lambda x: gm.all_to_all(x),
    lambda x: gm.shift(x),
    lambda x: gm.scan(x),
    lambda x: gm.halo_exchange(x),
    lambda x: gm.broadcast(x, dst=gm.R),
    lambda x: gm.all_reduce(x, op="logsumexp", dst=gm.R),
]


@pytest.mark.parametrize("number", range({tests}))
@pytest.mark.world({ranks}, backend="{backend}")
def test_the_gradient_is_the_difference_quotient(number, rank_generator):
    verb = VERBS[number % len(VERBS)]

    def draw(*shape):
        return torch.randn(*shape, generator=rank_generator, dtype=torch.float64)

    x = draw(2 * gm.world_size(), 3).requires_grad_()
    weight = draw(*verb(x.detach()).shape) * (1 + gm.rank())

    once = number % len(VERBS) == 2
    if once:
        # The same work on every rank, which counts once, needs the same cotangent on every rank.
        weight = torch.ones(())

    def loss(x):
        return (verb(x) * weight).sum().sin()

    loss(x).backward()
    direction, step = draw(*x.shape), 1e-6
    with torch.no_grad():
        ends = [loss(x + sign * step * direction) for sign in (1, -1)]
        slope = (ends[0] - ends[1]) / (2 * step)
        along = (x.grad * direction).sum()
        slope = slope if once else gm.all_reduce(slope, dst=gm.R)
        torch.testing.assert_close(gm.all_reduce(along, dst=gm.R), slope, rtol=1e-5, atol=1e-6)
"""


def measure(tests: int, ranks: int, backend: str) -> tuple[int, float]:
    """How many of the tests passed, and the seconds that the run took."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "test_gradients.py")
        text = TESTS
        for name, value in (("tests", tests), ("ranks", ranks), ("backend", backend)):
            text = text.replace(f"{{{name}}}", str(value))
        file.write_text(text)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "gradmesh_pytest",
            "-p",
            "no:cacheprovider",
            str(file),
        ]
        path = os.pathsep.join(filter(None, [str(Path("src").resolve()), os.environ.get("PYTHONPATH")]))
        begin = time.perf_counter()
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""},
            check=False,
        )
        seconds = time.perf_counter() - begin
    match = re.search(r"(\d+) passed", done.stdout)
    passed = int(match[1]) if match else 0
    if passed != tests:
        click.echo(done.stdout[-4000:] + done.stderr[-2000:], err=True)
    return passed, seconds


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--tests", default=300, show_default=True, help="Number of tests.")
@click.option("--ranks", default=4, show_default=True, help="Ranks of each test.")
@click.option("--backend", default="threads", show_default=True, help="Where the ranks are.")
def main(tests: int, ranks: int, backend: str) -> None:
    """Run them and print the time."""
    passed, seconds = measure(tests, ranks, backend)
    click.echo(f"{passed} of {tests} tests on {ranks} ranks ({backend}) passed in {seconds:.1f} s")
    if passed != tests:
        sys.exit(1)


if __name__ == "__main__":
    main()
