"""The plugin of pytest on ranks that are processes: what travels, and what of a failure comes back."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

import gradmesh_pytest
from gradmesh_pytest.running import Pools, Session
from tests.test_plugin import HEAD, OPTIONS, section

pytest_plugins = ["pytester"]
pytestmark = [pytest.mark.processes, pytest.mark.slow]  # some forty seconds

Inner = Callable[..., pytest.RunResult]


class Lent:
    """A plugin that lets an inner pytest have the ranks of another, which starting would take seconds."""

    def __init__(self, pools: Pools) -> None:
        self.pools = pools

    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[gradmesh_pytest._SESSION] = Session(config, self.pools)


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Inner:
    """Run pytest in this process on a file of tests, whose name is new to the ranks."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "200")
    pools = gradmesh_pytest._session(pytestconfig).pools

    def run(tests: str, *arguments: str, name: str) -> pytest.RunResult:
        pytester.makepyfile(**{f"test_of_{name}": HEAD + tests})
        return pytester.runpytest_inprocess(*OPTIONS, *arguments, plugins=[Lent(pools)])

    return run


def test_a_test_on_processes_has_its_fixtures_seeds_and_warnings(inner: Inner) -> None:
    result = inner(
        """
import os, warnings

@pytest.fixture
def values():
    return {"x": torch.ones(2), "model": torch.nn.Linear(2, 2), "pid": os.getpid()}

@pytest.mark.parametrize("shape", [(2, 1), (1, 3)], ids=str)
@pytest.mark.world(2, backend="shm")
def test_fixtures(values, tmp_path, shape, rank_generator):
    assert values["pid"] != os.getpid()
    assert torch.distributed.get_backend() == "shm"
    (tmp_path / f"{gm.rank()}").write_text(str(torch.initial_seed()))
    gm.barrier()
    drawn = torch.rand(shape, generator=rank_generator)
    assert not torch.equal(*gm.all_gather(drawn[None]))
    one, other = ((tmp_path / f"{rank}").read_text() for rank in range(2))
    assert int(other) == int(one) + 1
    gm.mesh(dp=2)

@pytest.mark.world(2, backend="shm")
def test_skips():
    with pytest.raises(gm.AxisError):
        gm.axis("dp")
    pytest.skip("not today")

@pytest.mark.world(2, backend="shm")
def test_warns():
    warnings.warn("look out")

def warns():
    with pytest.raises(UserWarning, match="look out"):
        warnings.warn("look out")

@pytest.mark.filterwarnings("error")
def test_warning_filter_option_is_honoured(world):
    world.run(warns)

def test_closures(world):
    scale = torch.full((2,), 3.0)
    results = world.run(lambda start: start + scale * gm.rank(), 1)
    assert [result.tolist() for result in results] == [[1, 1], [4, 4]]
""",
        "--world-backend=shm",
        "-rs",
        name="fixtures",
    )
    result.assert_outcomes(passed=5, skipped=1, warnings=1)
    result.stdout.fnmatch_lines(["*test_of_fixtures.py:*: UserWarning: look out", "SKIPPED * not today"])


def test_fixtures_that_cannot_travel_are_named(inner: Inner) -> None:
    result = inner(
        """
@pytest.fixture
def numbers():
    return (i for i in range(3))

@pytest.mark.world(2, backend="shm")
def test_of_pytest(capsys, tmp_path, monkeypatch):
    pass

@pytest.mark.world(2, backend="shm")
def test_in_separate_memory(numbers, tmp_path):
    pass

@pytest.mark.world(2)
def test_threads_have_them_all(capsys, numbers, monkeypatch, request):
    gm.barrier()
""",
        name="travel",
    )
    result.assert_outcomes(failed=2, passed=1)
    one = "\n".join(section(result, "test_of_pytest"))
    assert "gradmesh.pytest: the fixtures capsys, monkeypatch cannot be sent to process ranks" in one
    assert "a MonkeyPatch of _pytest, which acts on the process of pytest" in one
    other = "\n".join(section(result, "test_in_separate_memory"))
    assert "the fixture numbers cannot be sent" in other
    assert "numbers: cannot pickle 'generator' object" in other
    assert "gradmesh_pytest" not in one + other


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_failure_on_processes_is_shown_with_its_lines_and_values(inner: Inner, backend: str) -> None:
    result = inner(
        f"""
def helper(values):
    gm.barrier()
    assert gm.rank() == 0 or values == [1, 2, 5]

@pytest.mark.world(2, backend="{backend}")
def test_one_rank():
    helper([1, 2, gm.rank()])
""",
        name=f"failure_on_{backend}",
    )
    result.assert_outcomes(failed=1)
    shown = section(result, "test_one_rank")
    text = "\n".join(shown)
    assert ">       assert gm.rank() == 0 or values == [1, 2, 5]" not in text.split("def helper")[0]
    assert "At index 2 diff: 1 != 5" in text
    assert text.count("helper([1, 2, gm.rank()])") == 1
    assert shown[-1] == "passed (rank 0)"
    assert not [line for line in shown if "gradmesh_pytest" in line or "Traceback" in line]
    result.stdout.fnmatch_lines(["FAILED *::test_one_rank - rank 1 of 2: *"])


def test_a_rank_that_dies_is_named_and_the_next_test_has_new_ranks(inner: Inner) -> None:
    result = inner(
        """
import os

class OwnError(Exception):
    def __init__(self, code, reason):
        super().__init__(reason)

@pytest.mark.world(2, backend="shm")
def test_dies():
    if gm.rank():
        os._exit(5)

@pytest.mark.world(2, backend="shm")
def test_error_that_cannot_be_pickled(subtests):
    with subtests.test("one", i=3):
        assert gm.rank() == 0
    if gm.rank():
        raise OwnError(7, "of my own")
""",
        name="death",
    )
    result.assert_outcomes(failed=3 if hasattr(pytest, "Subtests") else 2)
    text = result.stdout.str()
    assert text.count("rank 1 of 2 failed with exit code 5") == 2
    assert text.count('raise OwnError(7, "of my own")') == 1
    result.stdout.fnmatch_lines(["*SUBFAILED*one*(i=3)* - rank 1 of 2: assert 1 == 0"])


def test_the_debugger_is_on_the_process_that_failed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        HEAD
        + """
@pytest.mark.world(2, backend="shm")
def test_it():
    secret = 10 + gm.rank()
    assert secret == 10
    gm.barrier()

def test_next():
    pass
"""
    )
    command = [sys.executable, "-m", "pytest", *OPTIONS, "--pdb"]
    result = pytester.run(*command, stdin=b"p secret * 3\nw\nq\n", timeout=120)
    result.stdout.fnmatch_lines(
        ["*assert 11 == 10", "This is rank 1.", "(Pdb) 33", "*Exit: Quitting debugger*"]
    )
    assert "test_next" not in result.stdout.str()
