"""cached_gradients: the gradients of the whole batch, by an encoder that is given a chunk at a time."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

import gradmesh as gm

Threads = Callable[[int], Callable[..., list[Any]]]
SIZES = (5, 2)


class Encoder(nn.Module):
    """Two embeddings of a sample, and the scale of their similarities."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4).double(), nn.Linear(6, 4).double()
        self.dropout, self.log_scale = nn.Dropout(dropout), nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.dropout(x)
        return self.left(x).tanh(), self.right(x).tanh(), self.log_scale.exp().squeeze()


def encoder(dropout: float = 0.0) -> Encoder:
    """The same on all ranks; threads share torch's generator, which is left alone."""
    made, numbers = Encoder(dropout), torch.Generator().manual_seed(0)
    for parameter in (*made.left.parameters(), *made.right.parameters()):
        nn.init.uniform_(parameter, -0.5, 0.5, generator=numbers)
    return made


def samples() -> Tensor:
    return torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss_of(left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    return gm.nn.clip_loss(left, right, scale, gather="ring", tile=2)


def grads(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in found if g is not None]


def whole_batch() -> list[Tensor]:
    """The gradients of one process."""
    model = encoder()

    def alone() -> list[Tensor]:
        copied = copy.deepcopy(model)
        loss_of(*copied(samples())).backward()
        return grads(copied)

    return gm.launch(alone, 1, backend="threads")[0]


@pytest.mark.parametrize("chunk", [1, 2, 4, 100])
def test_gradients_are_those_of_the_whole_batch(chunk: int, threads: Threads) -> None:
    def run() -> list[Tensor]:
        model = encoder()
        gm.nn.cached_gradients(model, samples()[gm.axis().slice(SIZES)], loss_of, chunk)
        return grads(model)

    found = threads(2)(run)
    for expected, *shares in zip(whole_batch(), *found, strict=True):
        torch.testing.assert_close(torch.stack(shares).sum(0), expected)


def test_a_rank_without_samples_takes_as_many_chunks(threads: Threads) -> None:
    def run() -> tuple[int, list[Tensor]]:
        model, calls = encoder(), []
        x = samples()[gm.axis().slice((0, 7))]
        model.register_forward_hook(lambda *_: calls.append(1))
        gm.nn.cached_gradients(model, x, loss_of, 3)
        return len(calls), grads(model)

    found = threads(2)(run)
    assert [calls for calls, _ in found] == [6, 6]
    for expected, *shares in zip(whole_batch(), *(g for _, g in found), strict=True):
        torch.testing.assert_close(torch.stack(shares).sum(0), expected)


def averaged(bucket: Any, reduced: list[int]) -> torch.futures.Future[Tensor]:
    """What DDP does with a bucket, counted."""
    reduced.append(1)
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer() / dist.get_world_size())
    return done


def wrapped(kind: str) -> tuple[int, list[Tensor]]:
    """Gradients of a wrapped encoder, and how often they were reduced."""
    model: Any = encoder()
    reduced: list[int] = []
    if kind == "ddp":
        model = DistributedDataParallel(model)

        model.register_comm_hook(None, lambda _, bucket: averaged(bucket, reduced))
    else:
        fully_shard(model)
    gm.nn.cached_gradients(
        model,
        samples()[gm.axis().slice(SIZES)],
        lambda *z: gm.objective(gm.nn.clip_loss(*z, dst=gm.R), loss_type=gm.R, ddp=model),
        2,
    )
    return len(reduced), grads(model)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_beside_a_wrapper_gradients_are_reduced_once_and_those_of_one_process(kind: str, worlds: Any) -> None:
    for times, found in worlds(2, "gloo", 240).run(wrapped, kind):
        assert times == (1 if kind == "ddp" else 0)
        for got, expected in zip(found, whole_batch(), strict=True):
            torch.testing.assert_close(got, expected)


def with_dropout(chunk: int) -> float:
    """How far gradients are from those of the chunks' graphs all in memory, with the same random numbers."""
    x = samples()[gm.axis().slice((4, 3))]
    model, other = encoder(0.5), encoder(0.5)
    torch.manual_seed(3 + gm.rank())
    gm.nn.cached_gradients(model, x, loss_of, chunk)
    after = torch.rand(1)
    torch.manual_seed(3 + gm.rank())
    left, right, scale = zip(*(other(part) for part in x.tensor_split(-(-4 // chunk))), strict=True)
    assert torch.equal(after, torch.rand(1))
    loss_of(torch.cat(left), torch.cat(right), scale[0]).backward()
    return max(float((a - b).abs().max()) for a, b in zip(grads(model), grads(other), strict=True))


@pytest.mark.processes
def test_dropout_is_the_same_both_times(worlds: Any) -> None:
    for off in worlds(2, "shm", 240).run(with_dropout, 2):
        assert off < 1e-14


class Running(nn.Module):
    """An encoder whose calls change buffers: its weight's norm is estimated, and its outputs' mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 4).double(), nn.BatchNorm1d(4, momentum=0.3).double()
        draw = torch.Generator().manual_seed(2)
        nn.init.uniform_(self.linear.weight, -0.5, 0.5, generator=draw)
        nn.init.zeros_(self.linear.bias)
        parametrizations.spectral_norm(self.linear)
        for name in ("_u", "_v"):
            estimate = getattr(self.linear.parametrizations["weight"][0], name)  # type: ignore[index]
            estimate.copy_(nn.functional.normalize(torch.randn(estimate.shape, generator=draw), dim=0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.linear(x))
        return y, y.sin()


@pytest.mark.parametrize("named", [False, True])
def test_buffers_change_once_and_the_second_run_has_those_of_the_first(named: bool) -> None:
    def loss(left: Tensor, right: Tensor) -> Tensor:
        return gm.nn.clip_loss(left, right, 1.0)

    def run() -> float:
        x = samples()[: 4 + 2 * gm.rank()]
        model, other = Running(), Running()
        if named:
            gm.nn.cached_gradients(lambda part: model(part), x, loss, 3, modules=[model])
        else:
            gm.nn.cached_gradients(model, x, loss, 3)
        left, right = zip(*map(other, x.tensor_split(2)), strict=True)
        loss(torch.cat(left), torch.cat(right)).backward()
        found, expected = ([*grads(each), *each.buffers()] for each in (model, other))
        return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))

    assert max(gm.launch(run, 2, backend="threads")) < 1e-14


def test_random_numbers_of_a_device_that_inputs_are_yet_to_be_moved_to_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, drawn = [torch.zeros(1)], list[float]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state[device].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda new, device: state.__setitem__(device, new))

    def encode(x: Tensor) -> Tensor:
        state[0] = state[0] + 1  # as a kernel on the device would
        drawn.append(float(state[0]))
        return x

    gm.launch(lambda: gm.nn.cached_gradients(encode, samples(), lambda x: x.sum(), 3), 1, backend="threads")
    assert drawn == [1, 2, 3, 1, 2, 3]
    assert float(state[0]) == 3


def test_a_loss_changes_a_buffer_of_the_encoder(threads: Threads) -> None:
    def run() -> float:
        model, seen = encoder(), torch.zeros(())
        model.register_buffer("seen", seen)

        def loss(*z: Tensor) -> Tensor:
            seen.add_(1)
            return loss_of(*z)

        gm.nn.cached_gradients(model, samples(), loss, 2)
        return float(seen)

    assert threads(2)(run) == [1.0, 1.0]


@pytest.mark.parametrize("ordered", [False, True])
def test_complex_embeddings_have_gradients(ordered: bool, threads: Threads) -> None:
    def loss(z: Tensor) -> Tensor:
        return (z.abs() ** 3).sum() + z.imag.sum()

    def complex_of(model: Encoder, x: Tensor) -> Tensor:
        return torch.complex(*model(x)[:2])

    def run() -> float:
        model, other, x = encoder(), encoder(), samples()
        with gm.ordered() if ordered else contextlib.nullcontext():
            gm.nn.cached_gradients(lambda part: complex_of(model, part), x, loss, 2)
        loss(complex_of(other, x)).backward()
        return max(float((a - b).abs().max()) for a, b in zip(grads(model), grads(other), strict=True))

    assert max(threads(2)(run)) < 1e-13


def test_a_check_warns_of_a_second_run_that_is_not_like_the_first(threads: Threads) -> None:
    def run() -> list[str]:
        calls: list[int] = []

        def encode(x: Tensor) -> Tensor:
            calls.append(1)
            return encoder()(x)[0] * len(calls)

        with gm.check("full"):
            gm.nn.cached_gradients(encode, samples(), lambda x: x.sum(), 7)
        return []

    with pytest.warns(gm.CheckWarning, match="the second run of a chunk gave other embeddings"):
        threads(1)(run)


def test_sums_of_replicated_weights_are_taken_once_also_over_micro_batches(threads: Threads) -> None:
    def step(model: Encoder, x: Tensor) -> None:
        def encode(part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            weights = {name: gm.replicate(p) for name, p in model.named_parameters()}
            return torch.func.functional_call(model, weights, (part,))

        gm.nn.cached_gradients(encode, x, loss_of, 2)

    def run() -> tuple[int, list[Tensor]]:
        model, x = encoder(), samples()[gm.axis().slice(SIZES)]
        for last in (False, True):
            with contextlib.nullcontext() if last else gm.no_sync():
                step(model, x)
        return 0, grads(model)

    seen = gm.verify.simulate(run, 2)
    for _, found in seen.results:
        for got, expected in zip(found, whole_batch(), strict=True):
            torch.testing.assert_close(got, 2 * expected)
    back = [e for e in seen.events.select(rank=0) if e.verb == "all_reduce" and e.payload >= 8 * 24]
    assert len(back) == 1


def test_in_ordered_a_rank_may_leave_its_embeddings_unused(threads: Threads) -> None:
    def run() -> list[Tensor]:
        model = encoder()

        def encode(part: Tensor) -> tuple[Tensor, Tensor]:
            left, right, _ = model(part)
            return left, gm.shift(right, sizes=None)

        with gm.ordered():
            x = samples()[gm.axis().slice((2, 2))]
            gm.nn.cached_gradients(encode, x, lambda a, b: a.sum() if gm.rank() else b.square().sum(), 1)
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]

    first, second = threads(2)(run)
    weights = [name for name, _ in encoder().named_parameters()]
    right = weights.index("right.weight")
    assert first[right].abs().sum() == 0
    assert second[right].abs().sum() > 0  # rank 0 squares what rank 1 sent


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (
            lambda: gm.nn.cached_gradients(lambda x: x, samples(), lambda x: x.sum(), 0),
            "cannot split the inputs into chunks",
        ),
        (
            lambda: gm.nn.cached_gradients(lambda x, y: x, (samples(), samples()[1:]), lambda x: x.sum(), 2),
            "cannot split the inputs into chunks",
        ),
        (
            lambda: gm.nn.cached_gradients(lambda x: x.sum(0), samples(), lambda x: x.sum(), 2),
            "encode returned invalid outputs",
        ),
        (
            lambda: gm.nn.cached_gradients(lambda x: None, samples(), lambda x: x.sum(), 2),  # type: ignore[arg-type]
            "encode returned invalid outputs",
        ),
        (
            lambda: gm.nn.cached_gradients(lambda x: (x,) * len(x), samples(), lambda *x: x[0].sum(), 2),
            "encode returned invalid outputs",
        ),
        (
            lambda: gm.nn.cached_gradients(lambda x: x, encoder()(samples())[0], lambda x: x.sum(), 2),
            "an input has a graph, which",
        ),
        (
            lambda: gm.nn.cached_gradients(encoder(), samples(), lambda *x: x[0], 2),
            "loss did not return a scalar that requires grad",
        ),
        (
            lambda: gm.nn.cached_gradients(encoder(), samples(), lambda *x: x[0].detach().sum(), 2),
            "loss did not return a scalar",
        ),
    ],
)
def test_wrong_input_raises_with_its_text(call: Callable[[], Tensor], problem: str, threads: Threads) -> None:
    def run() -> str:
        with pytest.raises(gm.ArgumentError) as found:
            call()
        return str(found.value)

    for text in threads(2)(run):
        assert problem in text
