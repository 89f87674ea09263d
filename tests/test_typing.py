"""Type checkers: right calls pass, and calls that raise at run time are rejected."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Union, get_overloads, get_type_hints

import pytest

from gradmesh.verbs import collectives as verbs
from gradmesh.verify import Profile, Timeline

RIGHT = """
import torch, gradmesh as gm
from collections.abc import Callable
from typing import NamedTuple, assert_type

x = torch.ones(2)
weight = torch.nn.Parameter(x)

class Pair(NamedTuple):
    k: torch.Tensor
    v: torch.Tensor

assert_type(gm.all_reduce(x, dst=gm.R), torch.Tensor)
assert_type(gm.all_reduce(weight, "tp", op="mean", dst=gm.I), torch.Tensor)
assert_type(gm.all_gather((x, x)), tuple[torch.Tensor, torch.Tensor])
assert_type(gm.shift([x], None, 1), list[torch.Tensor])
assert_type(gm.permute({"k": x}, pairs=[(0, 1)]), dict[str, torch.Tensor])
assert_type(gm.broadcast(Pair(x, x), root=1, dst=gm.I), Pair)
assert_type(gm.replicate(((x, [x]), {"v": x})), tuple[tuple[torch.Tensor, list[torch.Tensor]], dict[str, torch.Tensor]])
assert_type(gm.all_reduce(x, dst=gm.I, async_op=True), gm.Pending[torch.Tensor])
assert_type(gm.reduce_scatter(x, async_op=True), gm.Pending[torch.Tensor])
assert_type(gm.all_gather((x, x), async_op=True), gm.Pending[tuple[torch.Tensor, torch.Tensor]])
assert_type(gm.shift(x, async_op=bool(gm.rank())), torch.Tensor | gm.Pending[torch.Tensor])
assert_type(gm.exchange([x]), list[torch.Tensor])
assert_type(gm.exchange([x], async_op=True), gm.Pending[list[torch.Tensor]])
gm.all_gather(x=x, axis=gm.axis(), dim=-1, dst=gm.R if gm.rank() else gm.I, sizes="auto")
gm.shard(x, src=gm.R)
gm.reduce_scatter(x, op="mean")
for dst in (gm.P, gm.I, gm.V):
    gm.convert(x, src=gm.R, dst=dst)
gm.convert(x, src=gm.I, dst=gm.P)
gm.convert(x, src=gm.V, dst=gm.P)
gm.barrier("tp")
verb: Callable[[torch.Tensor], torch.Tensor] = gm.all_gather
offset: int = gm.axis().offset(gm.sizes(x))
gm.verify.matrix
gm.compat.towhee.AllGather
"""

WRONG = [
    "gm.all_reduce(x)",
    "gm.all_reduce(x, dst=gm.P)",
    "gm.all_reduce(x, dst='R')",
    "gm.all_reduce(x, dst=gm.R, op='avg')",
    "gm.all_reduce(x, 'tp', 'sum', dst=gm.R)",
    "gm.all_reduce([1.0], dst=gm.R)",
    "gm.all_gather(x, 1)",
    "gm.all_gather(x, dst=gm.V)",
    "gm.all_gather(x, sizes='even')",
    "gm.broadcast(x, 0)",
    "gm.broadcast(x, dst=gm.P)",
    "gm.shard(x, src=gm.V)",
    "gm.reduce_scatter(x, op='max')",
    "gm.convert(x, src=gm.P, dst=gm.R)",
    "gm.convert(x, src=gm.I, dst=gm.V)",
    "gm.convert(x, src=gm.V, dst=gm.I)",
    "gm.convert(x, src=gm.R, dst=gm.R)",
    "gm.convert(x, dst=gm.P)",
    "gm.permute(x)",
    "gm.shift(x, None, 0.5)",
    "gm.all_redcue(x)",
    "gm.barrier(2)",
]


LINES = [*RIGHT.strip().splitlines(), *WRONG]
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", params=["mypy", "pyright"])
def errors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The errors of a type checker in a user's file, for each of its lines."""
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    file = tmp_path_factory.mktemp("typing") / "user.py"
    file.write_text("\n".join(LINES))
    arguments = {
        "mypy": ["--config-file=", "--hide-error-context", "--no-pretty", str(file)],
        "pyright": ["--project", str(file.parent), "--pythonpath", sys.executable],
    }
    Path(file.parent, "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT / "src")]}))
    done = subprocess.run(
        [sys.executable, "-m", request.param, *arguments[request.param]],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
    )
    assert done.returncode in (0, 1), done.stderr
    found = [""] * len(LINES)
    for number, text in re.findall(r"user\.py:(\d+)(?::\d+)?(?: -|:) error: (.*)", done.stdout):
        found[int(number) - 1] += text
    return found


def test_right_calls_pass(errors: list[str]) -> None:
    right = len(LINES) - len(WRONG)
    assert {line: error for line, error in zip(LINES[:right], errors, strict=False) if error} == {}


@pytest.mark.parametrize("call", WRONG)
def test_wrong_call_is_an_error_that_names_the_function(call: str, errors: list[str]) -> None:
    name = call.removeprefix("gm.").partition("(")[0]
    assert name in errors[LINES.index(call)]


@pytest.mark.parametrize("name", [name for name in verbs.__all__ if name != "sizes"])
def test_help_shows_what_a_verb_returns(name: str) -> None:
    found = get_type_hints(getattr(verbs, name))["return"]
    declared = {get_type_hints(each)["return"] for each in get_overloads(getattr(verbs, name))}
    assert declared
    assert found == Union[tuple(declared)]  # noqa: UP007
    assert "Pending[" in str(found)
    assert "typing.Any" not in str(found)


@pytest.mark.parametrize("kind", [Profile, Timeline])
def test_the_earlier_name_of_the_start_time_works(kind: type[Profile | Timeline]) -> None:
    record = kind(begun=3)
    assert record.started == record.begun == 3
    record.started = 4
    assert record.begun == 4
