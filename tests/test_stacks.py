"""Looks at the stacks of threads that run on."""

from __future__ import annotations

import gc
import sys
import threading
import time
from types import FrameType

import pytest
import torch

import gradmesh as gm
from gradmesh._util.call_sites import main_stack, stack_of, stack_text, stacks
from gradmesh.launch.hang_detector import MainThread


def test_a_stack_has_the_frames_of_its_thread_from_the_innermost_on() -> None:
    began, end = threading.Event(), threading.Event()

    def outer() -> None:
        def inner() -> None:
            began.set()
            end.wait()

        inner()

    thread = threading.Thread(target=outer)
    thread.start()
    began.wait()
    stack, every = stack_of(thread.ident), stacks()
    end.set()
    thread.join()
    names = [code.co_name for code, _, _ in stack]
    assert names[names.index("inner") :] == ["inner", "outer", "run", "_bootstrap_inner", "_bootstrap"]
    code, instruction, line = stack[names.index("outer")]
    assert (code.co_filename, line) == (__file__, outer.__code__.co_firstlineno + 5)
    assert 0 <= instruction < len(code.co_code)
    assert every[thread.ident or 0][names.index("inner") :] == stack[names.index("inner") :]
    assert f'  File "{__file__}", line {line}, in outer\n    inner()\n' in stack_text(stack, below="nowhere")
    assert stack_text(stack, below=__file__).startswith(f'  File "{threading.__file__}"')


def test_a_thread_that_is_none_has_no_stack() -> None:
    assert stack_of(None) == stack_of(-1) == []
    assert stack_text([], below="anywhere") == ""


def test_the_stack_of_the_main_thread_is_that_of_who_asks_there() -> None:
    names = [code.co_name for code, _, _ in main_stack()]
    assert "test_the_stack_of_the_main_thread_is_that_of_who_asks_there" in names
    assert "test_the_stack_of_the_main_thread" in stack_text(main_stack(), below="nowhere")


def test_the_garbage_collector_does_not_start_while_threads_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collects: list[bool] = []

    def frames() -> dict[int, FrameType]:
        collects.append(gc.isenabled())
        return {}

    monkeypatch.setattr(sys, "_current_frames", frames)
    assert gc.isenabled()
    assert stacks() == {}
    assert main_stack() == []
    assert collects == [False, False]
    assert gc.isenabled()


def looked_at(seconds: float, least: int) -> int:
    """Messages come and go while a thread looks at the stack of the one that moves them; the number of looks."""
    looks, end = 0, time.monotonic() + seconds
    last = end + 60  # for a machine that stands still
    main = MainThread()

    def look() -> None:
        nonlocal looks
        while (now := time.monotonic()) < end or (looks <= least and now < last):
            main.waits()
            main.stack("nowhere")
            looks += 1
            time.sleep(0.0002)  # and begins in the middle of anything

    thread = threading.Thread(target=look)
    thread.start()
    x, other = torch.ones(3), 1 - gm.rank()
    goes_on = True
    while goes_on:
        for _ in range(50):
            gm.send(x, to=other)
        assert all(bool((got == 1).all()) for got in [gm.recv(x, source=other) for _ in range(50)])
        goes_on = bool(gm.all_reduce(torch.tensor(float(thread.is_alive())), dst=gm.R) == 2)
    thread.join()
    return looks


@pytest.mark.processes
@pytest.mark.parametrize("seconds", [3, pytest.param(120, marks=pytest.mark.slow)])
def test_a_rank_that_is_looked_at_without_a_pause_lives_on(seconds: int) -> None:
    least = 10 * seconds
    looks = gm.launch(looked_at, 2, args=(seconds, least), backend="shm", timeout=seconds + 120)
    assert min(looks) > least
