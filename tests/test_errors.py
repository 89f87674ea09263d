"""Bad input ends in the library's own error, on every rank, with a remedy."""

from __future__ import annotations

# What is called wrongly here is called so on purpose; test_typing.py shows what type checkers say.
# mypy: disable-error-code="arg-type, call-overload, list-item, type-var"
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradmesh as gm

Threads = Callable[[int], Callable[..., list[Any]]]
ones = torch.ones

BAD: dict[str, tuple[type[gm.GradmeshError], str, Callable[[], object]]] = {
    "dim too large": (gm.ArgumentError, "all_gather", lambda: gm.all_gather(ones(2, 3), dim=2)),
    "dim not an int": (gm.ArgumentError, "shard", lambda: gm.shard(ones(2), dim="x")),
    "scalar cut": (gm.ArgumentError, "reduce_scatter", lambda: gm.reduce_scatter(torch.tensor(1.0))),
    "root too large": (gm.ArgumentError, "broadcast", lambda: gm.broadcast(ones(2), root=2)),
    "root negative": (gm.ArgumentError, "reduce", lambda: gm.reduce(ones(2), root=-1)),
    "no dst": (gm.ArgumentError, "all_reduce", lambda: gm.all_reduce(ones(2))),
    "dst V": (gm.ArgumentError, "all_gather", lambda: gm.all_gather(ones(2), dst=gm.V)),
    "dst a string": (gm.ArgumentError, "all_reduce", lambda: gm.all_reduce(ones(2), dst="R")),
    "src V": (gm.ArgumentError, "shard", lambda: gm.shard(ones(2), src=gm.V)),
    "unknown op": (gm.ArgumentError, "all_reduce", lambda: gm.all_reduce(ones(2), op="median", dst=gm.R)),
    "op unhashable": (gm.ArgumentError, "all_reduce", lambda: gm.all_reduce(ones(2), op=[], dst=gm.R)),
    "max of a reduce_scatter": (
        gm.ArgumentError,
        "reduce_scatter",
        lambda: gm.reduce_scatter(ones(2), op="max"),
    ),
    "indivisible": (gm.ShapeError, "reduce_scatter", lambda: gm.reduce_scatter(ones(3))),
    "indivisible exchange": (gm.ShapeError, "all_to_all", lambda: gm.all_to_all(ones(3))),
    "sizes too few": (gm.ArgumentError, "all_gather", lambda: gm.all_gather(ones(2), sizes=[2])),
    "sizes negative": (gm.ArgumentError, "shard", lambda: gm.shard(ones(2), sizes=[3, -1])),
    "sizes a word": (gm.ArgumentError, "all_gather", lambda: gm.all_gather(ones(2), sizes="even")),
    "sizes auto of a whole": (gm.ArgumentError, "shard", lambda: gm.shard(ones(2), sizes="auto")),
    "sizes that do not add up": (gm.ShapeError, "shard", lambda: gm.shard(ones(4), sizes=[1, 2])),
    "sizes that are not true": (gm.ShapeError, "all_gather", lambda: gm.all_gather(ones(4), sizes=[3, 3])),
    "split sizes": (
        gm.ShapeError,
        "all_to_all",
        lambda: gm.all_to_all(ones(4), split_sizes=[1, 2], concat_sizes=[1, 2]),
    ),
    "source twice": (gm.ArgumentError, "permute", lambda: gm.permute(ones(2), pairs=[(0, 1), (0, 0)])),
    "target twice": (gm.ArgumentError, "permute", lambda: gm.permute(ones(2), pairs=[(0, 1), (1, 1)])),
    "pair of three": (gm.ArgumentError, "permute", lambda: gm.permute(ones(2), pairs=[(0, 1, 2)])),
    "to itself": (gm.ArgumentError, "send", lambda: gm.send(ones(2), to=gm.axis().rank)),
    "from a rank outside of the axis": (gm.ArgumentError, "recv", lambda: gm.recv(ones(2), source=2)),
    "too few parts": (gm.ArgumentError, "exchange", lambda: gm.exchange([ones(1)])),
    "parts of two dtypes": (gm.ArgumentError, "exchange", lambda: gm.exchange([ones(1), torch.arange(1)])),
    "reduce outside of ordered": (
        gm.OrderError,
        "reduce",
        lambda: gm.reduce(ones(2).requires_grad_(), async_op=True),
    ),
    "gather outside of ordered": (
        gm.OrderError,
        "gather",
        lambda: gm.gather(ones(2).requires_grad_(), async_op=True),
    ),
    "sizes of bools": (gm.ArgumentError, "shard", lambda: gm.shard(ones(2), sizes=(True, True))),
    "sizes without an order": (gm.ArgumentError, "shard", lambda: gm.shard(ones(4), sizes={3, 1})),
    "splits that ask": (gm.ArgumentError, "all_to_all", lambda: gm.all_to_all(ones(2), split_sizes="auto")),
    "a dtype's name": (gm.DTypeError, "shift", lambda: gm.shift(ones(2), comm_dtype="bf16")),
    "types in a list": (gm.ArgumentError, "convert", lambda: gm.convert(ones(2), src=[gm.R], dst=gm.P)),
    "an axis of numbers": (gm.AxisError, "scan", lambda: gm.scan(ones(2), torch.ones(2))),
    "a nested tensor": (
        gm.ArgumentError,
        "shift",
        lambda: gm.shift(torch.nested.nested_tensor([ones(1), ones(2)], layout=torch.strided)),
    ),
    "a quantized tensor": (
        gm.ArgumentError,
        "shift",
        lambda: gm.shift(torch.quantize_per_tensor(ones(2), 0.1, 0, torch.qint8)),
    ),
    "sizes of a meta tensor": (
        gm.ArgumentError,
        "all_gather",
        lambda: gm.all_gather(torch.ones(2, device="meta"), sizes="auto"),
    ),
    "pairs of no ranks": (gm.ArgumentError, "permute", lambda: gm.permute(ones(2), pairs=[(0, 5)])),
    "pairs no list": (gm.ArgumentError, "permute", lambda: gm.permute(ones(2), pairs=3)),
    "halo negative": (gm.ArgumentError, "halo_exchange", lambda: gm.halo_exchange(ones(2), halo=-1)),
    "offset a float": (gm.ArgumentError, "shift", lambda: gm.shift(ones(2), offset=0.5)),
    "wrap a number": (gm.ArgumentError, "shift", lambda: gm.shift(ones(2), wrap=1)),
    "conversion that needs a sum": (
        gm.ArgumentError,
        "convert",
        lambda: gm.convert(ones(2), src=gm.P, dst=gm.R),
    ),
    "unknown axis": (gm.AxisError, "scan", lambda: gm.scan(ones(2), "tp")),
    "axis a number": (gm.AxisError, "scan", lambda: gm.scan(ones(2), 3)),
    "not a tensor": (gm.ArgumentError, "all_gather", lambda: gm.all_gather([1.0])),
    "a sparse tensor": (gm.ArgumentError, "all_gather", lambda: gm.all_gather(ones(2).to_sparse())),
    "sum of bools": (gm.DTypeError, "scan", lambda: gm.scan(ones(2) > 0)),
    "mean of integers": (
        gm.DTypeError,
        "reduce_scatter",
        lambda: gm.reduce_scatter(torch.arange(2), op="mean"),
    ),
    "an integer on the wire": (gm.DTypeError, "shift", lambda: gm.shift(ones(2), comm_dtype=torch.int8)),
    "a real wire for complex": (
        gm.DTypeError,
        "shift",
        lambda: gm.shift(ones(2, dtype=torch.complex64), backward_dtype=torch.float32),
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises_on_every_rank_with_a_remedy(case: str, threads: Threads) -> None:
    kind, verb, call = BAD[case]

    def on_each_rank() -> str:
        with pytest.raises(kind) as caught:
            call()
        # Nothing was sent: the next collective meets its like on the other rank.
        assert gm.all_gather(torch.tensor([gm.axis().rank])).tolist() == [0, 1]
        return str(caught.value)

    for rank, text in enumerate(threads(2)(on_each_rank)):
        first, *rest = text.splitlines()
        assert first.startswith(f"gradmesh.{verb}: ")
        labels = [line.split()[0] for line in rest if line.startswith("  ") and not line.startswith("   ")]
        wanted = (
            ["expected", "got", "remedy"] if kind is gm.AxisError else ["axis", "expected", "got", "remedy"]
        )
        assert labels == wanted
        if kind is not gm.AxisError:
            assert f"rank {rank} of 2" in text


def test_the_error_for_no_dst_explains_the_two_in_two_lines(threads: Threads) -> None:
    def on_each_rank() -> str:
        with pytest.raises(gm.ArgumentError) as caught:
            gm.all_reduce(ones(2))
        return str(caught.value)

    remedy = threads(1)(on_each_rank)[0].split("remedy")[1].strip().splitlines()
    assert len(remedy) == 2
    assert "dst=gm.R" in remedy[0]
    assert "dst=gm.I" in remedy[1]


GUESSES: dict[str, Callable[[], object]] = {
    "dim=1": lambda: gm.all_gather(ones(2, 2), 1),
    "dim=0": lambda: gm.reduce_scatter(ones(2), axis=0),
    "dim=-1": lambda: gm.shard(ones(2), -1),
    "root=0": lambda: gm.broadcast(ones(2), 0),
    "offset=2": lambda: gm.shift(ones(2), 2),
    "op='sum'": lambda: gm.all_reduce(ones(2), "sum", dst=gm.R),
    "op='mean'": lambda: gm.reduce_scatter(ones(2), "mean"),
}


@pytest.mark.parametrize("guess", GUESSES)
def test_an_argument_in_the_place_of_the_axis_is_guessed(guess: str, threads: Threads) -> None:
    def on_each_rank() -> str:
        with pytest.raises(gm.AxisError) as caught:
            GUESSES[guess]()
        with gm.use_mesh(gm.mesh(tp=1)), pytest.raises(gm.AxisError) as in_mesh:
            GUESSES[guess]()
        assert "did you mean" in str(in_mesh.value)
        return str(caught.value)

    (text,) = threads(1)(on_each_rank)
    assert text.splitlines()[-1] == f"  remedy    did you mean {guess}?"


NO_GUESSES: dict[str, Callable[[], object]] = {
    "an unknown name": lambda: gm.all_reduce(ones(2), "tp", dst=gm.R),
    "no reduction of this verb": lambda: gm.reduce_scatter(ones(2), "max"),
    "a verb without reductions": lambda: gm.all_gather(ones(2), "sum"),
    "a verb without numbers": lambda: gm.scan(ones(2), 1),
    "a bool": lambda: gm.all_gather(ones(2), True),
}


@pytest.mark.parametrize("case", NO_GUESSES)
def test_nothing_is_guessed_where_nothing_fits(case: str, threads: Threads) -> None:
    def on_each_rank() -> str:
        with pytest.raises(gm.AxisError) as caught:
            NO_GUESSES[case]()
        return str(caught.value)

    assert "did you mean" not in threads(1)(on_each_rank)[0]


def test_an_axis_that_is_called_like_a_reduction_is_an_axis(threads: Threads) -> None:
    def on_each_rank() -> float:
        with gm.use_mesh(gm.mesh(sum=2)):
            return gm.all_reduce(torch.tensor(1.0), "sum", dst=gm.R).item()

    assert threads(2)(on_each_rank) == [2.0, 2.0]


def test_a_conversion_that_needs_communication_names_the_verb(threads: Threads) -> None:
    def on_each_rank() -> None:
        with pytest.raises(gm.ArgumentError, match=r"remedy .*: use gm\.reduce_scatter"):
            gm.convert(ones(2), src=gm.P, dst=gm.V)

    threads(1)(on_each_rank)


def test_calls_before_init_say_to_init() -> None:
    with pytest.raises(gm.NotInitializedError, match=r"gradmesh.all_gather(.|\n)*gradmesh.init\(\)"):
        gm.all_gather(ones(2))
    with pytest.raises(gm.NotInitializedError):
        gm.axis("tp")
    with pytest.raises(gm.NotInitializedError):
        gm.mesh(tp=1)


def test_half_a_launchers_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        gm.NotInitializedError, match=r"not set: WORLD_SIZE, MASTER_ADDR, MASTER_PORT(.|\n)*torchrun"
    ):
        gm.init()


def test_different_collectives_on_the_ranks_are_distinguished(threads: Threads) -> None:
    def on_each_rank() -> str:
        x = ones(2)
        with pytest.raises(gm.MismatchError) as caught:
            gm.all_gather(x) if gm.axis().rank else gm.broadcast(x)
        return str(caught.value)

    for text in gm.launch(on_each_rank, 2, backend="threads"):
        assert "test_errors.py" in text
