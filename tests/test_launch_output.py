"""Output of ranks: whole lines with the rank, in order, without loss or blocking."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import io
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from gradmesh.errors import ArgumentError, RankError
from gradmesh.launch import Ranks, launch
from gradmesh.launch.output import LineSplitter, OutputPipes, Screen

Run = Callable[..., list[Any]]


@pytest.fixture(
    scope="module", params=["threads", pytest.param("shm", marks=pytest.mark.processes)], name="run"
)
def two_ranks(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Run a function on two ranks of either kind."""
    with Ranks(2, backend=request.param, timeout=120) as ranks:
        yield ranks.run


def by_rank(text: str) -> dict[str, list[str]]:
    """The lines of each rank; every line has to carry one."""
    lines: dict[str, list[str]] = {}
    for line in text.removesuffix("\n").split("\n"):
        found = re.fullmatch(r"\[rank (\d)\] ?(.*)", line)
        assert found, line
        lines.setdefault(found[1], []).append(found[2])
    return lines


def on_a_terminal(text: str) -> list[str]:
    """The lines that are visible after the text was written to a terminal."""
    lines = [""]
    column = 0
    for part in re.split(r"(\r|\n)", text):
        if part == "\r":
            column = 0
        elif part == "\n":
            lines.append("")
            column = 0
        else:
            lines[-1] = lines[-1][:column] + part + lines[-1][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]


# ---- lines


def test_pieces_of_any_length_give_the_same_lines() -> None:
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choice(["a", "b ", "\n", "\r", "\r\n", "é"]) for _ in range(draw.randrange(30)))
        splitter = LineSplitter()
        lines, at = [], 0
        while at < len(text):
            size = draw.randrange(1, 6)
            lines += splitter.feed(text[at : at + size])
            at += size
        lines += splitter.rest()
        whole = LineSplitter()
        assert lines == whole.feed(text) + whole.rest()
        assert "".join(map("".join, lines)).removesuffix("\n") == text.replace("\r\n", "\n").removesuffix(
            "\n"
        )
        assert not splitter.rest()


@pytest.mark.timed
def test_a_long_line_costs_time_in_proportion_to_its_length() -> None:
    def seconds(pieces: int) -> float:
        splitter = LineSplitter()
        start = time.thread_time()  # without what other processes take
        for _ in range(pieces):
            splitter.feed("x" * 4096)
        assert len(splitter.feed("\n")[0][0]) == pieces * 4096
        return time.thread_time() - start

    few = min(seconds(1000) for _ in range(3))
    assert min(seconds(4000) for _ in range(3)) < 12 * few + 0.02


def test_progress_bars_of_two_ranks_cover_each_other_and_leave_no_remains() -> None:
    out = io.StringIO()
    screen = Screen(lambda: out)
    bars = [LineSplitter(), LineSplitter()]
    for step in range(4):
        for rank, bar in enumerate(bars):
            screen.show(f"[rank {rank}] ", bar.feed(f"\r{step}/3 " + "=" * (9 - 3 * step)))
    assert on_a_terminal(out.getvalue())[0].startswith("[rank 1] 2/3 ===")
    screen.show("[rank 0] ", bars[0].feed("\nok\n"))
    screen.show("[rank 1] ", bars[1].rest())
    screen.finish()
    assert on_a_terminal(out.getvalue()) == ["[rank 0] 3/3", "[rank 0] ok", "[rank 1] 3/3", ""]
    # The terminal of this test does show remains.
    assert on_a_terminal("a longer one\rshort\n") == ["shortger one", ""]


def test_a_progress_bar_that_clears_itself_leaves_nothing() -> None:
    out = io.StringIO()
    screen = Screen(lambda: out)
    splitter = LineSplitter()
    for text in ("\r 50%", "\r100%", "\r      \r", "done\n"):
        screen.show("[rank 1] ", splitter.feed(text))
    screen.show("[rank 1] ", splitter.rest())
    screen.finish()
    assert on_a_terminal(out.getvalue()) == ["[rank 1] done", ""]


def test_an_empty_line_has_a_mark_without_a_blank() -> None:
    out = io.StringIO()
    Screen(lambda: out).show("[rank 1] ", LineSplitter().feed("\n"))
    assert out.getvalue() == "[rank 1]\n"


def test_characters_that_the_stream_cannot_show_are_escaped() -> None:
    raw = io.BytesIO()
    ascii_only = io.TextIOWrapper(raw, encoding="ascii")
    Screen(lambda: ascii_only).write("5 µs\n")
    ascii_only.flush()
    assert raw.getvalue() == b"5 \\xb5s\n"
    Screen(lambda: None).write("a process without a console\n")


# ---- pipes, read from programs that are quicker to start than ranks


def shown(*commands: str, prefix: bool | None = None, until: str | None = None) -> str:
    """What is shown of shell commands that take the place of ranks; read until they exit, or until a text came."""
    pipes = OutputPipes(len(commands), prefix)
    programs = []
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for rank, command in enumerate(commands):
            (out_end, write_out), (err_end, write_err) = os.pipe(), os.pipe()
            started = subprocess.Popen(
                ["bash", "-c", command], stdout=write_out, stderr=write_err, start_new_session=True
            )
            programs.append(started)
            pipes.add(rank, out_end, err_end)
            os.close(write_out)
            os.close(write_err)
        try:
            deadline = time.monotonic() + 60
            while until not in out.getvalue() if until else any(p.poll() is None for p in programs):
                assert time.monotonic() < deadline
                pipes.show(pipes.open)
                time.sleep(0.001)
            start = time.monotonic()
            pipes.drain()
            assert time.monotonic() - start < 5
        finally:
            for program in programs:
                with contextlib.suppress(OSError):
                    os.killpg(program.pid, 9)
                program.wait()
            pipes.close()
    return out.getvalue()


@pytest.mark.timed
def test_megabytes_from_several_ranks_arrive_whole() -> None:
    text = shown(*["for i in {1..20000}; do echo $i-{a,b,c,d}{e,f,g,h}; done"] * 2)
    lines = by_rank(text)
    letters = " ".join(f"%d-{a}{b}" for a in "abcd" for b in "efgh")
    expected = [letters.replace("%d", str(i)) for i in range(1, 20001)]
    assert lines == {"0": expected, "1": expected}


@pytest.mark.timed
def test_output_of_a_killed_process_is_shown() -> None:
    assert shown("echo one; printf two; kill -9 $$", "true") == "[rank 0] one\n[rank 0] two\n"


@pytest.mark.timed
def test_child_that_keeps_the_pipe_open_does_not_block_the_launch() -> None:
    assert shown("sleep 60 & echo one", "true") == "[rank 0] one\n"


@pytest.mark.timed
def test_program_that_never_stops_printing_does_not_block() -> None:
    text = shown("yes", "true", until="y")
    assert set(by_rank(text)["0"]) <= {"y", ""}


@pytest.mark.timed
def test_characters_that_are_cut_in_two_and_bytes_that_are_none() -> None:
    command = r"printf 'a\xc3'; sleep 0.05; printf '\xa9b\n'; printf '\xff\n'; printf '\xe2\x82'"
    assert shown(command, "true") == "[rank 0] aéb\n[rank 0] \\xff\n[rank 0] \\xe2\\x82\n"


@pytest.mark.timed
def test_lines_without_a_mark_are_whole_and_one_rank_has_none() -> None:
    parts = "printf a; sleep 0.02; printf b; sleep 0.02; echo c"
    assert shown(parts, parts, prefix=False) == "abc\nabc\n"
    assert shown(parts + "; printf '\\rd'") == "abc\n\rd"
    assert shown(parts, prefix=True) == "[rank 0] abc\n"
    assert shown(parts, prefix=False) == "abc\n"


# ---- ranks


def print_in_pieces(lines: int) -> None:
    for i in range(lines):
        print("line", i, "of", lines, end=" ")
        print("on rank", dist.get_rank())
        if i % 10 == 0:
            print("error", i, file=sys.stderr)
    print("no end", end="")


def test_lines_that_all_ranks_print_at_once_are_whole(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run(print_in_pieces, 400)
    out, err = capsys.readouterr()
    assert by_rank(out) == {
        str(rank): [f"line {i} of 400 on rank {rank}" for i in range(400)] + ["no end"] for rank in range(2)
    }
    assert by_rank(err) == {str(rank): [f"error {i}" for i in range(0, 400, 10)] for rank in range(2)}


def test_lines_follow_the_callers_redirected_stream(run: Run) -> None:
    """The output of a notebook is such a stream: it has no file descriptor."""
    before = sys.stdout, sys.stderr
    for text in ("first", "second"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            run(print, text)
        assert sorted(out.getvalue().splitlines()) == [f"[rank 0] {text}", f"[rank 1] {text}"]
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.processes
def test_output_of_c_code_and_children_is_shown_also_at_exit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work() -> tuple[bool, str]:
        print("µ")
        os.system("echo from a shell; echo error >&2")
        ctypes.CDLL(None).puts(b"from C")
        sys.stdout.buffer.write(b"\xff\n")
        found = sys.stdout.isatty(), sys.stdout.encoding
        sys.stdout = None  # a function may leave it so, and the rank goes on
        return found

    def last_words() -> None:
        sys.stdout = sys.__stdout__
        atexit.register(lambda: print("x" * 300_000))  # more than a pipe holds

    with Ranks(2, timeout=60) as ranks:
        assert ranks.run(work) == [(False, "utf-8")] * 2
        ranks.run(last_words)
    out, err = capsys.readouterr()
    assert by_rank(err) == {"0": ["error"], "1": ["error"]}
    lines = by_rank(out)
    for rank in "01":
        assert sorted(lines[rank]) == sorted(["µ", "from a shell", "\\xff", "from C", "x" * 300_000])
        assert lines[rank][:2] == ["µ", "from a shell"]
        assert lines[rank][-1] == "x" * 300_000


# ---- threads


def test_streams_are_as_before_after_success_and_failure() -> None:
    def fail() -> None:
        print("text")
        raise ValueError("boom")

    before = sys.stdout, sys.stderr
    launch(print, 2, backend="threads", args=("text",))
    assert (sys.stdout, sys.stderr) == before
    with pytest.raises(RankError):
        launch(fail, 2, backend="threads")
    assert (sys.stdout, sys.stderr) == before


def test_output_of_failing_threads_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        print("last words", end="")
        if dist.get_rank() == 1:
            raise ValueError("boom")
        dist.barrier()

    with pytest.raises(RankError):
        launch(fail, 2, backend="threads")
    assert by_rank(capsys.readouterr().out) == {"0": ["last words"], "1": ["last words"]}


def test_concurrent_launches_keep_their_lines_separate(capsys: pytest.CaptureFixture[str]) -> None:
    def work(name: str) -> None:
        for i in range(200):
            print(name, i)

    before = sys.stdout
    callers = [
        threading.Thread(target=launch, args=(work, 3), kwargs={"backend": "threads", "args": (name,)})
        for name in "abc"
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert sys.stdout is before
    lines = by_rank(capsys.readouterr().out)
    assert sorted(lines) == ["0", "1", "2"]
    for rank in lines.values():
        for name in "abc":
            assert [line for line in rank if line.startswith(name)] == [f"{name} {i}" for i in range(200)]


def test_a_rank_that_launches_ranks_puts_its_mark_before_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    def outer() -> None:
        launch(print, 2, backend="threads", args=("inner",))
        launch(print, 1, backend="threads", args=("alone",))
        print("outer")

    launch(outer, 2, backend="threads")
    lines = capsys.readouterr().out.splitlines()
    inner = ["[rank 0] inner", "[rank 1] inner", "alone", "outer"]
    assert sorted(lines) == sorted(f"[rank {rank}] {line}" for rank in range(2) for line in inner)


def test_only_ranks_are_marked_while_ranks_run(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        print("rank", end=" ")
        if dist.get_rank() == 0:
            thread = threading.Thread(target=print, args=("no rank",))
            thread.start()
            thread.join()
        print("done")

    launch(work, 2, backend="threads")
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["[rank 0] rank done", "[rank 1] rank done", "no rank"]


def test_one_rank_writes_as_it_likes_and_a_mark_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> bool:
        print("\r50%", end="")
        return sys.stdout is before

    before = sys.stdout
    assert launch(work, 1, backend="threads") == [True]
    assert capsys.readouterr().out == "\r50%"
    assert launch(work, 1, backend="threads", prefix=True) == [False]
    assert capsys.readouterr().out == "[rank 0] 50%\n"
    launch(print, 2, backend="threads", args=("a", "b"), prefix=False)
    assert capsys.readouterr().out == "a b\na b\n"
    with pytest.raises(ArgumentError, match="prefix='gpu'"):
        launch(print, 2, prefix="gpu")  # type: ignore[arg-type]


def test_stream_replaced_by_user_code_stays() -> None:
    def work() -> None:
        if dist.get_rank() == 0:
            sys.stdout = other
        dist.barrier()

    before, other = sys.stdout, io.StringIO()
    try:
        launch(work, 2, backend="threads")
        assert sys.stdout is other
    finally:
        sys.stdout = before


def test_the_stream_in_place_has_the_attributes_of_the_one_behind_it() -> None:
    def work() -> list[object]:
        stream = sys.stdout
        with pytest.raises(TypeError):
            stream.write(b"no text")  # type: ignore[arg-type]
        stream.writelines(["a\n", "b\n"])
        stream.flush()
        return [stream.encoding, stream.isatty(), stream.buffer, stream.closed, stream.writable()]

    raw = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(raw, encoding="latin-1")) as out:
        found = launch(work, 2, backend="threads")
        out.flush()
    assert found == [["latin-1", False, raw, False, True]] * 2
    assert sorted(raw.getvalue().decode().splitlines()) == [
        f"[rank {rank}] {line}" for rank in range(2) for line in "ab"
    ]
