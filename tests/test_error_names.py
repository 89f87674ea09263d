"""What a user reads of an error: its public class, and its text without the library's own exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradmesh as gm


def use_pending() -> object:
    return gm.all_reduce(torch.ones(2), dst=gm.R, async_op=True).sum()


def forget_dst() -> object:
    return gm.all_reduce(torch.ones(2))  # type: ignore[call-overload]


@pytest.mark.parametrize(("program", "kind"), [(use_pending, "OrderError"), (forget_dst, "ArgumentError")])
def test_a_failure_names_a_public_class_and_shows_no_inner_exception(
    threads: Callable[[int], Callable[..., Any]], program: Callable[[], object], kind: str
) -> None:
    with pytest.raises(gm.RankError) as caught:
        threads(2)(program)
    assert f"failed with {kind}" in str(caught.value)
    assert "During handling" not in str(caught.value) + caught.value.rank_traceback
