"""The plain scripts match their first lines: wrong ones are wrong, right ones right, by finite differences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts import RIGHT, SCRIPTS, WRONG, Script, read
from tests.scripts.evidence import common_factor, shown
from tests.scripts.running import Derivative
from tools import scripts

RULES = {
    *(f"GM{number}" for number in range(101, 113)),
    *(f"GM{number}" for number in range(201, 210)),
    *(f"GM{number}" for number in (301, 302, 303, 304, 305, 401, 402, 403, 501)),
}
QUICK = ("megatron_f_without_sum", "cp_loss_divided_twice", "same_batches", "megatron_mlp", "ddp_token_mean")


def marked(name: str) -> object:
    return pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow], id=name)


@pytest.mark.processes
@pytest.mark.parametrize("name", [marked(name) for name in SCRIPTS])
def test_script_matches_its_description(name: str) -> None:
    assert shown(SCRIPTS[name]) is not None


def test_there_are_enough_of_each_kind() -> None:
    assert len(WRONG) >= 44
    assert len(RIGHT) >= 30
    assert not set(WRONG) & set(RIGHT)
    assert len(SCRIPTS) == len(WRONG) + len(RIGHT)


def test_every_rule_has_two_wrong_scripts() -> None:
    expected = [script.expected for script in WRONG.values()]
    assert set(expected) == RULES
    assert all(expected.count(rule) >= 2 for rule in RULES)


@pytest.mark.parametrize("script", WRONG.values(), ids=WRONG)
def test_wrong_script_names_its_rule_lines_and_a_fixed_version(script: Script) -> None:
    assert script.expected in RULES
    assert script.also <= RULES - {script.expected}
    assert script.lines
    assert script.twin is None or script.twin in RIGHT


@pytest.mark.parametrize("script", RIGHT.values(), ids=RIGHT)
def test_a_right_script_expects_nothing(script: Script) -> None:
    assert (script.expected, script.also, script.lines, script.twin) == (None, frozenset(), (), None)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_is_complete_short_and_says_how_many_ranks(script: Script) -> None:
    text = script.path.read_text()
    assert 20 <= len(text.splitlines()) <= 100
    assert 'dist.init_process_group("gloo")' in text
    assert 'if __name__ == "__main__":' in text
    assert script.ranks in (2, 4)
    assert (script.timeout is not None) == (script.expected in ("GM401", "GM402"))
    assert bool(re.search(r"^import gradmesh", text, re.MULTILINE)) == script.name.startswith("gradmesh")


def test_the_first_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text(
        "# about: a bias\n# ranks: 4\n# expect: GM101\n# also: GM102\n# twin: x\n# cut: a b\n# timeout: 5\n"
        "import torch\nx = 1  # <- here\n# ranks: 8\n"
    )
    script = read(path)
    assert (script.name, script.about, script.ranks, script.expected) == ("one", "a bias", 4, "GM101")
    assert script.also == {"GM102"}
    assert (script.twin, script.cut, script.timeout) == ("x", ("a", "b"), 5.0)
    assert script.lines == (9,)


@pytest.mark.parametrize(
    ("factors", "true", "common"),
    [
        ([(0.5, 0.5), (0.5,)], 1.0, 0.5),
        ([(0.5, 0.6), (0.5,)], 1.0, None),
        ([(0.5,), (1.0,)], 1.0, None),
        ([(float("nan"),)], 1.0, None),
        ([(0.5,)], 0.0, None),
    ],
)
def test_gradients_have_a_factor_in_common_or_none(
    factors: list[tuple[float, ...]], true: float, common: float | None
) -> None:
    found = [Derivative("p", one, true) for one in factors]
    assert common_factor(found) == common


def test_exit_status_of_the_tool_matches_its_findings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "shown", lambda script: None)
    assert scripts.main(["--only", "megatron_mlp"]) == 1
    assert "NOT SHOWN" in capsys.readouterr().out
    monkeypatch.setattr(scripts, "shown", lambda script: "seen")
    assert scripts.main(["--only", "megatron_mlp"]) == 0
