"""The example of two halves of a digit runs at a small size, and ranks compute what one computes."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "clip_digits.py"


def printed(monkeypatch: pytest.MonkeyPatch, capsys: Any, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    return str(capsys.readouterr().out)


def test_ranks_equal_one_rank(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("sklearn")
    small = ("--batch", "30", "--chunk", "6", "--steps", "3")
    one = printed(monkeypatch, capsys, "--ranks", "1", *small)
    four = printed(monkeypatch, capsys, "--ranks", "4", *small)
    assert "4 ranks, batch 30: loss" in four
    assert one.split(":")[1] == four.split(":")[1]
