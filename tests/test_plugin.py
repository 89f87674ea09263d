"""The plugin of pytest on ranks that are threads: what runs where, and what reports say of it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import gradmesh_pytest

pytest_plugins = ["pytester"]

Inner = Callable[..., pytest.RunResult]

HEAD = "import pytest, torch, time, unittest\nimport gradmesh as gm\n"


LEAN = ("cacheprovider", "unraisableexception", "threadexception", "faulthandler")
"""Plugins of pytest that take time and that these tests do not need."""
OPTIONS = ["-Walways", "-p", "gradmesh_pytest", *(f"-pno:{name}" for name in LEAN)]


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Inner:
    """Run pytest in this process on a file of tests, without other plugins."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "200")

    def run(tests: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(HEAD + tests)
        return pytester.runpytest_inprocess(*OPTIONS, *arguments)

    return run


def section(result: pytest.RunResult, name: str) -> list[str]:
    """The lines of a report, from its headline to the next."""
    lines = result.outlines
    heads = [at for at, line in enumerate(lines) if re.fullmatch(rf"_+ {re.escape(name)} _+", line)]
    assert len(heads) == 1, lines
    end = next(
        at
        for at, line in enumerate(lines)
        if at > heads[0] and re.fullmatch(r"(_+ (?!rank \d+ of).* _+)|(=+.*)", line)
    )
    return lines[heads[0] : end]


# ---- what runs


def test_a_test_that_turns_gradients_off_does_not_do_so_for_the_next(inner: Inner) -> None:
    result = inner(
        """
@pytest.mark.world(2)
def test_off():
    torch.set_grad_enabled(False)

@pytest.mark.world(2)
def test_on():
    assert torch.is_grad_enabled()
"""
    )
    result.assert_outcomes(passed=2)


def test_the_body_runs_on_every_rank_with_the_same_values(inner: Inner) -> None:
    result = inner(
        """
seen = []

@pytest.fixture
def value():
    return torch.ones(2)

@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.world(4)
def test_sum(value, factor):
    seen.append((gm.rank(), id(value)))
    x = (gm.rank() * value).requires_grad_()
    (gm.all_reduce(x, dst=gm.R) * (1 + gm.rank()) * factor).sum().backward()
    assert x.grad.tolist() == [10.0 * factor] * 2

class TestInAClass:
    @pytest.mark.world(4)
    def test_method(self, value):
        seen.append((gm.rank(), id(value)))

def test_what_was_seen():
    assert sorted(rank for rank, _ in seen) == sorted([*range(4)] * 3)
    assert len({value for _, value in seen}) <= 3
"""
    )
    result.assert_outcomes(passed=4)


def test_mark_and_parameter_may_request_several_worlds(inner: Inner) -> None:
    result = inner(
        """
sizes = []

@pytest.mark.world(1, 3, backend=["threads"])
def test_each():
    if gm.rank() == 0:
        sizes.append(gm.world_size())

@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.world(4))])
@pytest.mark.world(2)
def test_of_a_parameter(size):
    assert gm.world_size() == size

@pytest.mark.parametrize("world", [2, (3, "threads")], indirect=True)
def test_fixture(world):
    assert world(gm.rank) == [*range(world.size)]
    assert world.backend == "threads"

@pytest.mark.world(3)
def test_fixture_of_a_marked_test(world):
    assert world.run(lambda x, y: x + y + gm.rank(), 1, y=2) == [3, 4, 5]

@pytest.mark.world(2, 3)
def test_fixture_of_several(world):
    sizes.append(world.size)

def test_fixture_alone(world):
    assert world.size == 2
    assert sizes == [1, 3, 2, 3]
""",
        "-v",
    )
    result.assert_outcomes(passed=10)
    assert [name for name in ("test_each[1-threads]", "test_each[3-threads]") if name in result.stdout.str()]


def test_configured_value_is_the_default(inner: Inner, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nworld_size = 3\nworld_backend = threads\nworld_timeout = 60\n")
    tests = """
def test_size(world):
    assert (world.size, world.backend) == (3, "threads")
    assert world._where.timeout == 60

@pytest.mark.world(2, timeout=5)
def test_mark(world):
    assert (world.size, world._where.timeout) == (2, 5)
"""
    inner(tests).assert_outcomes(passed=2)
    refused = inner("def test_size(world):\n    pass\n", "--world-backend=smoke", "--world-timeout=7")
    refused.assert_outcomes(passed=1)  # no rank was asked for anything
    unknown = inner("@pytest.mark.world(2)\ndef test_it():\n    pass\n", "--world-backend=smoke")
    unknown.stdout.fnmatch_lines(["*ArgumentError: gradmesh.launch: invalid backend*", "*backend='smoke'*"])


@pytest.mark.parametrize(
    ("mark", "problem"),
    [
        ("(0)", "invalid number of ranks"),
        ("(True)", "invalid number of ranks"),
        ("('4')", "invalid number of ranks"),
        ("(2, ranks=3)", "unknown argument 'ranks' of the mark world"),
        ("(2, backend=3)", "invalid backend"),
        ("(2, timeout=-1)", "invalid timeout"),
    ],
)
def test_a_mark_that_cannot_be_used_is_an_error_of_the_library(inner: Inner, mark: str, problem: str) -> None:
    result = inner(f"@pytest.mark.world{mark}\ndef test_it():\n    pass\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"E *ArgumentError: gradmesh.pytest: {problem}", "E *remedy *"])
    assert "gradmesh_pytest" not in result.stdout.str()


def test_each_test_starts_without_leftovers_of_another(inner: Inner) -> None:
    result = inner(
        """
@pytest.mark.world(2)
def test_leaves_much():
    gm.mesh(dp=2)
    assert gm.axis().name == "dp"
    gm.ordered().__enter__()

@pytest.mark.world(2)
def test_finds_nothing():
    assert gm.axis().name != "dp"
    x = torch.ones(1, requires_grad=True)
    gm.all_reduce(x, dst=gm.I).backward()
    assert x.grad.item() == 1

@pytest.mark.world(2)
def test_ends_the_group():
    gm.barrier()
    torch.distributed.destroy_process_group()

@pytest.mark.world(2)
def test_has_a_group():
    gm.barrier()
"""
    )
    result.assert_outcomes(passed=4)


def test_random_numbers_come_back_and_differ_between_ranks_and_tests(inner: Inner) -> None:
    tests = """
drawn = {}

@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.world(3)
def test_draws(rank_generator, turn):
    drawn[turn, gm.rank()] = torch.rand((), generator=rank_generator).item()

def test_all(world, rank_generator):
    assert len(set(drawn.values())) == 6
    print("drawn", sorted(drawn.items()))
    before = torch.get_rng_state()
    shared = [world.run(torch.initial_seed) for _ in range(2)]
    assert shared[0] == shared[1] and torch.initial_seed() != shared[0]
    assert torch.equal(before, torch.get_rng_state())
"""
    one, two, other = inner(tests, "-s"), inner(tests, "-s"), inner(tests, "-s", "--world-seed=1")
    drawn = [[line for line in result.outlines if "drawn" in line] for result in (one, two, other)]
    one.assert_outcomes(passed=3)
    assert drawn[0] == drawn[1] != drawn[2]


# ---- what failed


def test_a_failure_is_shown_once_with_its_rank_and_its_values(inner: Inner) -> None:
    result = inner(
        """
@pytest.mark.world(4)
def test_one_rank():
    values = [1, 2, gm.rank()]
    gm.barrier()
    assert gm.rank() != 3 or values == [1, 2, 5]
"""
    )
    result.assert_outcomes(failed=1)
    shown = section(result, "test_one_rank")
    assert sum("def test_one_rank" in line for line in shown) == 1
    assert any("At index 2 diff: 3 != 5" in line for line in shown)
    assert [line for line in shown if re.match("_+ rank", line)] == [
        line for line in shown if "rank 3 of 4" in line
    ]
    assert shown[-1] == "passed (ranks 0, 1 and 2)"
    assert "gradmesh_pytest" not in "\n".join(shown)
    result.stdout.fnmatch_lines(["FAILED *::test_one_rank - rank 3 of 4: *"])


def test_equal_failures_are_summarized_and_different_ones_shown(inner: Inner) -> None:
    result = inner(
        """
@pytest.mark.world(4)
def test_identical():
    assert [1] == [2]

@pytest.mark.world(3)
def test_values_differ():
    assert gm.rank() == 10

@pytest.mark.world(4)
def test_kinds_differ():
    gm.barrier()
    if gm.rank() == 1:
        raise ValueError("boom")
    if gm.rank() == 2:
        raise KeyError("bam")
"""
    )
    result.assert_outcomes(failed=3)
    alike = section(result, "test_identical")
    assert alike[-2].strip("_ ") == "rank 0 of 4"
    assert alike[-1] == "the same on ranks 1, 2 and 3"
    values = section(result, "test_values_differ")
    assert values[-2:] == ["rank 1: assert 1 == 10", "rank 2: assert 2 == 10"]
    kinds = "\n".join(section(result, "test_kinds_differ"))
    for text in ('raise ValueError("boom")\nE', 'raise KeyError("bam")\nE', "passed (ranks 0 and 3)"):
        assert kinds.count(text) == 1


def test_a_failure_inside_of_world_run_shows_both_lines(inner: Inner) -> None:
    result = inner(
        """
def on_rank(x):
    assert gm.rank() * x < 3

def test_runs(world):
    world.run(on_rank, 1)
    world.run(on_rank, 5)

def test_catches(world):
    with pytest.raises(gm.RankError, match="rank 1 of 2 failed with AssertionError") as caught:
        world.run(on_rank, 5)
    assert caught.value.rank == 1
"""
    )
    result.assert_outcomes(failed=1, passed=1)
    shown = "\n".join(section(result, "test_runs"))
    assert "assert (1 * 5) < 3" in shown
    assert ">       world.run(on_rank, 5)\nE " in shown
    assert shown.count("AssertionError") <= 3
    assert "Traceback" not in shown
    assert "gradmesh_pytest" not in shown


def test_exception_that_would_end_the_session_fails_only_its_test(inner: Inner) -> None:
    result = inner(
        """
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
@pytest.mark.world(2)
def test_ends(error):
    if gm.rank():
        raise error

@pytest.mark.world(2, timeout=2)
def test_hangs():
    while gm.rank():
        time.sleep(0.01)

@pytest.mark.world(2)
def test_waits_for_ever():
    if gm.rank():
        gm.barrier()

@pytest.mark.world(2)
def test_next():
    gm.barrier()
"""
    )
    result.assert_outcomes(failed=5, passed=1)
    result.stdout.fnmatch_lines(
        [
            "FAILED *SystemExit*rank 1 of 2: SystemExit: 3",
            "FAILED *rank 1 of 2: KeyboardInterrupt",
            "FAILED *rank 1 of 2: GeneratorExit",
            "FAILED *::test_hangs - gradmesh.pytest: rank 1 of 2 did not return*",
            "FAILED *::test_waits_for_ever - rank 1 of 2: gradmesh.errors.Deadlock*",
        ]
    )
    assert any("time.sleep(0.01)" in line for line in section(result, "test_hangs"))


def test_exit_of_pytest_ends_the_session(inner: Inner) -> None:
    result = inner(
        "@pytest.mark.world(2)\ndef test_ends():\n    pytest.exit('enough')\n\ndef test_next():\n    pass\n"
    )
    result.assert_outcomes()
    result.stdout.fnmatch_lines(["*Exit: enough*"])


# ---- skip, xfail, subtests


def test_a_skip_on_every_rank_skips_and_on_some_is_an_error_that_names_them(inner: Inner) -> None:
    result = inner(
        """
@pytest.mark.world(3)
def test_all():
    pytest.skip("not today")

@pytest.mark.world(2)
def test_reasons():
    pytest.skip(f"reason {gm.rank()}")

@pytest.mark.world(3)
def test_some():
    if gm.rank() == 1:
        pytest.skip("not today")

@pytest.mark.world(3)
def test_some_and_others_wait():
    if gm.rank() == 1:
        pytest.xfail("not yet")
    gm.barrier()

@pytest.mark.world(2)
def test_one_skips_and_one_fails():
    assert gm.rank() == 0
    pytest.skip("not today")

def test_inside(world):
    world.run(pytest.skip, "not today")
""",
        "-rs",
    )
    result.assert_outcomes(skipped=3, failed=3)
    result.stdout.fnmatch_lines_random(
        ["SKIPPED * not today", "SKIPPED * rank 0: reason 0; rank 1: reason 1"]
    )
    some = "\n".join(section(result, "test_some"))
    assert "MismatchError" in some
    assert re.search(r"rank 1: skipped: not today\nE +ranks 0 and 2: passed\n", some)
    waiting = "\n".join(section(result, "test_some_and_others_wait"))
    assert re.search(
        r"rank 1: xfailed: not yet\nE +ranks 0 and 2: waited .*line \d+, in test_some_and", waiting
    )
    failed = section(result, "test_one_skips_and_one_fails")
    assert failed[-2].strip("_ ") == "rank 1 of 2"
    assert failed[-1] == "skipped: not today (rank 0)"


def test_expected_failures_are_those_of_ranks(inner: Inner) -> None:
    result = inner(
        """
@pytest.mark.world(2)
def test_called():
    pytest.xfail("not yet")

@pytest.mark.xfail(raises=ValueError, strict=True)
@pytest.mark.world(2)
def test_marked():
    if gm.rank():
        raise ValueError

@pytest.mark.xfail(raises=ValueError)
@pytest.mark.world(2)
def test_another_error():
    if gm.rank():
        raise KeyError
""",
    )
    result.assert_outcomes(xfailed=2, failed=1)


def test_subtests_and_test_cases_of_unittest_are_reported_once(inner: Inner) -> None:
    result = inner(
        """
class TestCase(unittest.TestCase):
    def setUp(self):
        self.limit = 1

    @pytest.mark.world(3)
    def test_method(self):
        with self.subTest("small", i=1):
            self.assertLess(gm.rank(), self.limit + 1)
        with self.subTest("large"):
            self.assertLess(gm.rank(), 10)

    @pytest.mark.world(2)
    def test_skips(self):
        self.skipTest("not today")

    @pytest.mark.world(2, 3)
    def test_several(self):
        pass

    @pytest.mark.world(2)
    def test_passes(self):
        self.assertEqual(gm.world_size(), 2)

    def test_of_no_rank(self):
        self.assertFalse(torch.distributed.is_initialized())
"""
    )
    text = result.stdout.str()
    assert text.count("AssertionError: 2 not less than 2") == (2 if hasattr(pytest, "Subtests") else 1)
    assert "rank 2 of 3" in text
    assert "passed (ranks 0 and 1)" in text
    assert "ArgumentError: gradmesh.pytest: several worlds for a test that cannot be parametrized" in text
    assert result.parseoutcomes()["skipped"] == 1
    assert result.parseoutcomes()["passed"] >= 2


@pytest.mark.skipif(not hasattr(pytest, "Subtests"), reason="this pytest has no subtests of its own")
def test_subtests_of_pytest_are_reported_once(inner: Inner) -> None:
    result = inner(
        """
@pytest.mark.world(3)
def test_it(subtests):
    for i in range(3):
        with subtests.test("sub", i=i):
            assert i != 1 or gm.rank() == 0
    with subtests.test("skips"):
        pytest.skip("not today")
    assert gm.rank() < 2
"""
    )
    text = result.stdout.str()
    assert re.search(r"_ test_it \[sub\] \(i=1\) _", text)
    assert re.search(r"SUBFAILED.*rank 1 of 3", text)
    assert "rank 2: " in text
    assert re.search(r"FAILED .*::test_it - rank 2 of 3: assert 2 < 2", text)
    assert len(re.findall(r"^_+ test_it", text, re.MULTILINE)) == 2


# ---- the options of pytest


def test_the_first_failure_ends_the_run_on_request(inner: Inner) -> None:
    result = inner(
        "@pytest.mark.world(2)\n@pytest.mark.parametrize('i', [0, 1, 2])\ndef test_it(i):\n    assert i == 0\n",
        "-x",
    )
    result.assert_outcomes(passed=1, failed=1)


DEBUGGER = """
class Debugger:
    quitting = False

    def __init__(self, *arguments, **options):
        pass
    def reset(self):
        pass
    def setup(self, frame, trace):
        pass
    def interaction(self, frame, trace):
        trace = getattr(trace, "__traceback__", trace)  # since Python 3.13 it is the error
        while trace.tb_next:
            trace = trace.tb_next
        frame = trace.tb_frame
        print("in the debugger:", frame.f_code.co_name, frame.f_locals["secret"])
    def set_trace(self, frame):
        print("stopped at:", frame.f_code.co_name, frame.f_locals["secret"])
"""


def test_the_debugger_is_on_the_rank_that_failed(inner: Inner, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(a_debugger=DEBUGGER)
    result = inner(
        """
def helper(secret):
    assert secret < 30

@pytest.mark.world(4)
def test_it():
    helper(10 * gm.rank())

def test_no_limit_of_time(world):
    assert world._where.timeout is None

@pytest.mark.world(3)
def test_stops():
    secret = gm.rank() ** 2
    if gm.rank() == 2:
        breakpoint()
    gm.barrier()
""",
        "--pdb",
        "--pdbcls=a_debugger:Debugger",
    )
    result.assert_outcomes(failed=1, passed=2)
    result.stdout.fnmatch_lines(["in the debugger: helper 30", "stopped at: test_stops 4"])


@pytest.mark.parametrize("style", ["short", "line", "native", "no"])
def test_every_traceback_style_names_the_rank(inner: Inner, style: str) -> None:
    result = inner("@pytest.mark.world(2)\ndef test_it():\n    assert gm.rank() == 0\n", f"--tb={style}")
    result.stdout.fnmatch_lines(["FAILED *::test_it - rank 1 of 2: *"])


def test_tests_run_side_by_side_under_xdist(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile(
        HEAD
        + """
@pytest.mark.parametrize("i", range(6))
@pytest.mark.world(2)
def test_it(i):
    assert i != 4 or gm.rank() == 0
"""
    )
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "200")
    result = pytester.runpytest_subprocess(*OPTIONS, "-p", "xdist", "-n", "2", timeout=120)
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(["*rank 1 of 2*", "passed (rank 0)", "FAILED *[[]4[]] - rank 1 of 2: *"])


def test_hypothesis_runs_its_examples_on_the_ranks_of_the_session(inner: Inner) -> None:
    result = inner(
        """
from hypothesis import given, settings, strategies as st

@settings(max_examples=20, database=None, derandomize=True)
@given(start=st.integers(0, 5))
def test_sums(worlds, start):
    assert worlds(2).run(lambda: start + gm.rank()) == [start, start + 1]

@settings(max_examples=20, database=None, derandomize=True)
@given(start=st.integers(0, 5))
def test_fails(worlds, start):
    worlds(2).run(lambda: 1 // max(0, 3 - start))
""",
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*ZeroDivisionError*", "*rank 0 of 2*", "the same on rank 1"])


# ---- what it costs those who do not use it


def test_loading_the_plugin_imports_neither_torch_nor_gradmesh() -> None:
    code = (
        "import sys, pytest; before = set(sys.modules); import gradmesh_pytest\n"
        "new = set(sys.modules) - before\n"
        "assert not new & {'torch', 'gradmesh', 'numpy'}, new\n"
        "assert all(name.startswith('gradmesh_pytest') for name in new), new\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_library_does_not_import_the_plugin() -> None:
    source = Path(gradmesh_pytest.__file__).parent
    library = source.parent / "gradmesh"
    assert not [file for file in library.rglob("*.py") if "gradmesh_pytest" in file.read_text()]


def test_pytest_finds_the_plugin_by_the_package() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"gradmesh_pytest": "gradmesh_pytest"}
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert "src/gradmesh_pytest" in packages
    assert not any("pytest" in name for name in project["project"]["dependencies"])
