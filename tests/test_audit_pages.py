"""What the pages say of audits is what the code says, and nothing of gradmesh has a finding."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gradmesh.verify import audit
from gradmesh.verify.auditing.findings import KINDS, table
from tools.audits import SYSTEMS, drop_ins, plans

PAGE = (Path(__file__).parent.parent / "docs" / "reports" / "audits.md").read_text()
OWN = {**SYSTEMS["gradmesh"], **plans(), **drop_ins()}
SOME = [
    "all_gather(dst=I)",
    "reduce",
    "scatter",
    "halo_exchange",
    "all_reduce(op='prod', dst=R)",
    "towhee.AllGather",
]


def test_the_page_has_the_table_of_kinds() -> None:
    assert table() in PAGE
    assert len(KINDS) == table().count("\n") - 1


def test_the_page_has_every_call_of_gradmesh_and_no_finding_in_one() -> None:
    own = PAGE[PAGE.index("### gradmesh:") : PAGE.index("### torch.distributed.nn")]
    rows = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*?) \|$", own, re.MULTILINE)
    assert {call for call, _, _ in rows} == set(OWN)
    assert {findings for _, _, findings in rows} == {"none"}
    assert all("->" in arrows for _, arrows, _ in rows)


def test_the_page_names_the_kinds_that_there_are() -> None:
    found = PAGE[PAGE.index("## Findings") :]
    named = {
        name
        for line in found.splitlines()
        if line.startswith("|")
        for name in re.findall(r"`([a-z-]+)`", line)
    }
    calls = {call for calls in SYSTEMS.values() for call in calls} | set(OWN)
    assert named - calls <= set(KINDS)


@pytest.mark.parametrize("call", SOME)
def test_a_call_of_gradmesh_has_no_finding(call: str) -> None:
    build: Any = OWN[call]
    found = audit(build, world_size=2)
    assert found.ok, found
    assert found.arrows


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("call", list(drop_ins()))
def test_no_drop_in_has_a_finding(call: str, size: int) -> None:
    if size == 3 and call.startswith(("megatron", "fairchem", "torch_nn")):
        pytest.skip("its operand is cut for two ranks")
    assert audit(OWN[call], world_size=size).ok
