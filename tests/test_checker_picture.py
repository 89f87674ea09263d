"""The types of a program's lines, and the picture of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmesh.checker.judging.context import Context
from gradmesh.checker.picture import Line, drawn, lines_of
from gradmesh.checker.run import Target, check_script
from tests.scripts import WRONG

pytestmark = pytest.mark.processes


def test_picture_has_lines_with_the_types_of_their_results(tmp_path: Path) -> None:
    seen: list[list[Line]] = []

    def see(context: Context) -> None:
        seen.append(lines_of(context))

    script = WRONG["megatron_g_sums"]
    verdict = check_script(Target(str(script.path)), ranks=2, steps=1, timeout=60.0, see=see)
    [lines] = seen
    made = [(line.place.text.split("  #")[0], str(line.type), line.sends) for line in lines]
    assert made == [
        ("loss = F.cross_entropy(model(x), y)", "I", ""),
        ("h = CopyToTensorParallel.apply(self.norm(x))", "R", ""),
        ("return x.view_as(x)", "R", ""),
        ("h = F.gelu(F.linear(h, self.up_weight, self.up_bias))", "V", ""),
        ("h = ReduceFromTensorParallel.apply(F.linear(h, self.down_weight))", "P", ""),
        ("x = x.clone()", "P", ""),
        ("dist.all_reduce(x)", "I", "all_reduce"),
        ("return x + h + self.down_bias", "I", ""),
    ]
    assert lines[4].takes == (3,)
    picture = tmp_path / "types.png"
    drawn(lines, verdict.findings, "a program").savefig(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
