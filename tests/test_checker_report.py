"""A verdict as text: everything is said, at every width, and colour only where there is a terminal."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gradmesh.checker.findings import Verdict
from gradmesh.checker.report import ranks_of, show, summary
from tests.checker_samples import finding, one_of_each


def shown(verdict: Verdict, folder: Path, width: int = 100, **options: bool) -> str:
    out = io.StringIO()
    show(verdict, Console(file=out, width=width, highlight=False, markup=False, **options), folder)  # type: ignore[arg-type]
    return out.getvalue()


def joined(text: str) -> str:
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_finding_is_printed_in_full_at_every_width(tmp_path: Path, width: int) -> None:
    verdict = one_of_each(tmp_path)
    text = joined(shown(verdict, tmp_path, width))
    for each in verdict.findings:
        wanted = [each.rule.id, each.rule.name, each.severity, each.message, each.subject, each.remedy]
        wanted += [place.text for place in (each.at, each.began) if place]
        for part in wanted:
            assert joined(part) in text, part
    assert "acellwasnotfollowed" in text
    assert joined("gradmesh explain " + " ".join(sorted({each.rule.id for each in verdict.findings}))) in text


@pytest.mark.parametrize("width", [20, 100])
def test_a_place_stands_in_one_piece_however_narrow_the_terminal(tmp_path: Path, width: int) -> None:
    lines = shown(one_of_each(tmp_path), tmp_path, width).splitlines()
    assert "  at src/a model.py:10 in Model.forward" in lines
    assert "  began at train.py:3 in <module>" in lines


def test_lines_keep_within_the_width_but_for_places(tmp_path: Path) -> None:
    for line in shown(one_of_each(tmp_path), tmp_path, 40).splitlines():
        assert len(line) <= 40 or line.startswith(("  at ", "  began at ")), line


def test_there_is_colour_on_a_terminal_and_none_elsewhere(tmp_path: Path) -> None:
    assert "\x1b" not in shown(one_of_each(tmp_path), tmp_path)
    assert "\x1b[" in shown(one_of_each(tmp_path), tmp_path, force_terminal=True)


def test_origin_is_printed_only_if_on_another_line(tmp_path: Path) -> None:
    own = finding()
    assert "began" not in shown(Verdict((replace(own, began=own.at),), (), 2, 1), tmp_path)


def test_a_finding_of_a_later_step_names_it(tmp_path: Path) -> None:
    first, later = (Verdict((finding(step=step),), (), 2, 2) for step in (1, 3))
    assert "step" not in shown(first, tmp_path).splitlines()[0]
    assert shown(later, tmp_path).splitlines()[0].endswith("all ranks, step 3")


def test_a_finding_that_looks_like_markup_is_printed_as_it_is(tmp_path: Path) -> None:
    assert "[bold]not markup[/bold]" in shown(one_of_each(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        (Verdict((), (), 2, 1), "no finding; 2 ranks, 1 step"),
        (Verdict((), (), 2, 0, status="not-run"), "no finding; 2 ranks, 0 steps; it did not run"),
        (
            Verdict(
                (finding(), finding("GM203")), (), 4, 2, {"checked": 5.0, "judged": 0.25}, memory=3 << 29
            ),
            "1 error, 1 warning; 4 ranks, 2 steps; checked 5.0 s, judged 0.2 s, 1.5 GiB",
        ),
        (
            Verdict((finding("GM203"),) * 2, (), 4, 2, {"checked": 5.0}, "stopped"),
            "2 warnings; 4 ranks, 2 steps; checked 5.0 s; stopped before the end",
        ),
    ],
)
def test_the_last_line_has_counts_and_seconds(verdict: Verdict, text: str, tmp_path: Path) -> None:
    assert summary(verdict) == text
    assert shown(verdict, tmp_path).splitlines()[-1] == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), ""),
        ((3,), "rank 3"),
        ((0, 1, 2, 3), "all ranks"),
        ((2, 0), "ranks 0, 2"),
        ((0, 1), "ranks 0, 1"),
        ((1, 2, 3), "ranks 1-3"),
        ((0, 2, 3), "ranks 0, 2, 3"),
    ],
)
def test_ranks_in_words(ranks: tuple[int, ...], text: str) -> None:
    assert ranks_of(ranks, 4) == text
