"""Random tests whose ranks end in random ways: every rank is reported once, with what happened there."""

from __future__ import annotations

import random
import re

import pytest

from tests.test_plugin import HEAD, OPTIONS, section

pytest_plugins = ["pytester"]

WAYS = ("passes", "asserts", "compares", "raises", "raises its rank", "skips", "xfails", "exits", "hangs")

BODY = """
def end(way):
    rank = gm.rank()
    if way == "asserts":
        assert way == "no"
    if way == "compares":
        assert rank == 100
    if way == "raises":
        raise ValueError("boom")
    if way == "raises its rank":
        raise KeyError(rank)
    if way == "skips":
        pytest.skip("not today")
    if way == "xfails":
        pytest.xfail("not yet")
    if way == "exits":
        raise SystemExit(3)
    while way == "hangs":
        time.sleep(0.005)
    if way == "dies":
        os._exit(5)
"""


def programs(number: int, seed: int, size: int = 4) -> list[list[str]]:
    """How each rank ends, for each test; at most every fourth has a rank that hangs, which takes time."""
    draw = random.Random(seed)
    found = []
    for at in range(number):
        ways = draw.sample(WAYS if at % 4 == 0 else WAYS[:-1], k=draw.choice([1, 2, 3]))
        found.append([draw.choice(ways) for _ in range(size)])
    return found


def source(listed: list[list[str]], backend: str) -> str:
    # Only a rank that hangs needs the limit: it would show any other rank that stood still for so long as late.
    tests = "\n\n".join(
        f'@pytest.mark.world({len(ways)}, backend="{backend}", timeout={2 if "hangs" in ways else 60})\n'
        f"def test_{number}():\n    end({ways!r}[gm.rank()])"
        for number, ways in enumerate(listed)
    )
    return f"import os\n{HEAD}{BODY}\n\n{tests}\n"


FAILS = {"asserts", "compares", "raises", "raises its rank", "exits", "dies"}


def expected_outcome(ways: list[str]) -> str:
    kinds = set(ways)
    if len(kinds) == 1 and kinds <= {"passes", "skips", "xfails"}:
        return {"passes": "passed", "skips": "skipped", "xfails": "xfailed"}[ways[0]]
    return "failed"


def ranks_of(text: str) -> list[int]:
    """The ranks that words such as `ranks 0, 2 and 3` name."""
    return [int(number) for number in re.findall(r"\d+", text)]


def printed(shown: list[str], size: int) -> dict[int, str]:
    """What a report says of each rank; an error where it says two things of one."""
    found: dict[int, str] = {}

    def add(numbers: list[int], what: str) -> None:
        for number in numbers:
            assert number not in found, (number, found[number], what, shown)
            found[number] = what

    error = ""
    in_error = False  # in a text of the library that names ranks by itself
    head: int | None = None
    for line in shown[1:]:
        if match := re.fullmatch(rf"_+ rank (\d+) of {size} _+", line):
            if head is None:
                add([int(match[1])], error)
            head, error = int(match[1]), ""
            pending = head
            if pending not in found:
                found[pending] = "?"
        elif re.match(r"(E  +|gradmesh\S+: )", line) and head is not None and found[head] == "?":
            found[head] = line.removeprefix("E").strip()
        elif line.startswith("E ") and not error:
            error = line.removeprefix("E").strip()
        elif match := re.fullmatch(r"the same on (ranks? [\d, and]+)", line):
            add(ranks_of(match[1]), "the same")
        elif match := re.fullmatch(r"rank (\d+): (.*)", line):
            add([int(match[1])], match[2])
        elif match := re.fullmatch(
            r"(passed|skipped.*|xfailed.*|timed out.*|waited.*) \((ranks? .*)\)", line
        ):
            add(ranks_of(match[2]), match[1])
        in_error = in_error or "MismatchError" in line or "did not return within" in line
        if in_error and head is None:
            if match := re.fullmatch(r"E +(?:got +)?(ranks? [\d, and]+): (\w.*)", line):
                add(ranks_of(match[1]), match[2])
            if match := re.fullmatch(r"E +Stack of rank (\d+):", line):
                add([int(match[1])], "stack")
    return found


WORDS = {
    "passes": "passed",
    "asserts": r"assert 'asserts' == 'no'|the same|AssertionError.*",
    "compares": r"assert \d == 100.*|the same|AssertionError.*",
    "raises": r"ValueError: boom|the same",
    "raises its rank": r"KeyError: \d|\d",
    "skips": r"skipped: not today",
    "xfails": r"xfailed: not yet",
    "exits": r"SystemExit: 3|the same",
    "hangs": r"timed out.*|stack",
    "dies": r".*",
}


def check(ways: list[str], shown: list[str]) -> None:
    found = printed(shown, len(ways))
    assert sorted(found) == list(range(len(ways))), (ways, found, shown)
    for rank, way in enumerate(ways):
        assert re.fullmatch(WORDS[way], found[rank]), (ways, rank, found, shown)


def attack(pytester: pytest.Pytester, listed: list[list[str]], backend: str = "threads") -> None:
    pytester.makepyfile(**{f"test_attack_on_{backend}": source(listed, backend)})
    recorded = pytester.inline_run(*OPTIONS)
    reports = {
        report.nodeid.rpartition("_")[2]: report
        for report in recorded.getreports("pytest_runtest_logreport")
        if report.when == "call"
    }
    for number, ways in enumerate(listed):
        report = reports[str(number)]
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        assert outcome == expected_outcome(ways), (ways, report.longreprtext)
        if outcome == "failed":
            check(ways, ["head", *report.longreprtext.splitlines()])


@pytest.fixture(autouse=True)
def _lean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.timed
def test_every_rank_is_reported_once(pytester: pytest.Pytester) -> None:
    attack(pytester, programs(24, seed=6))


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.parametrize("seed", range(20))
def test_every_rank_is_reported_once_in_full(pytester: pytest.Pytester, seed: int) -> None:
    attack(pytester, programs(50, seed=100 + seed, size=seed % 4 + 2))


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.processes
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_every_process_rank_is_reported_once(pytester: pytest.Pytester, backend: str) -> None:
    drawn = random.Random(5)
    listed = [
        ["dies" if way == "exits" and drawn.random() < 0.5 else way for way in ways]
        for ways in programs(12, seed=7, size=3)
    ]
    attack(pytester, listed, backend)


@pytest.mark.parametrize(
    "lost",
    [
        ["the same on ranks 1 and 2", "passed (rank 2)"],
        ["the same on rank 1"],
        ["rank 1: KeyError: 3", "rank 2: assert 7 == 100"],
    ],
)
def test_a_report_that_leaves_out_or_repeats_a_rank_is_noticed(lost: list[str]) -> None:
    head = ["head", "E       ValueError: boom", "___ rank 0 of 3 ___"]
    check(["raises", "raises", "passes"], [*head, "the same on rank 1", "passed (rank 2)"])
    with pytest.raises(AssertionError):
        check(["raises", "raises", "passes"], [*head, *lost])


def test_the_section_of_a_report_is_found(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess(*OPTIONS)
    with pytest.raises(AssertionError):
        section(result, "test_that_is_not_there")
