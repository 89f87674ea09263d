"""Contrastive losses: the dense loss of one process at every order and in every mode, a tile of its table at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gradmesh as gm
from gradmesh.nn.contrastive.table import Gather
from gradmesh.verify import Input, Shard, audit, gradcheck, same_as_single
from tests.contrastive_programs import DENSE, LOSSES, TABLES, Program, differs, on_rank

Threads = Callable[[int], Callable[..., list[Any]]]
GATHERS = [(loss, gather) for loss in DENSE for gather in (("all", "ring") if loss in TABLES else ("all",))]

SCALE = torch.tensor(1.3, dtype=torch.float64)
BIAS = torch.tensor(-0.4, dtype=torch.float64)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def of(loss: str, gather: str, tile: int | None = 2, **options: Any) -> Callable[..., Tensor]:
    """The loss of x, y, scale and bias, with labels that repeat."""

    def run(x: Tensor, y: Tensor, s: Tensor = SCALE, b: Tensor = BIAS) -> Tensor:
        labels = torch.arange(len(x)) % 2
        return LOSSES[loss](x, y, s, b, labels, gather=gather, tile=tile, **options)

    return run


@pytest.mark.parametrize(("loss", "gather"), GATHERS)
@pytest.mark.parametrize("sizes", [(4,), (2, 3), (0, 4, 1)], ids=str)
def test_value_and_two_derivatives_are_those_of_the_dense_loss(
    loss: str, gather: str, sizes: tuple[int, ...], threads: Threads
) -> None:
    for tile in (1, 2, None) if loss in TABLES else (None,):
        program = Program(loss, sizes, gather=gather, tile=tile, explicit_sizes=tile == 2)
        assert differs(program, threads(len(sizes))(on_rank, program)) is None


@pytest.mark.parametrize(("loss", "gather"), GATHERS)
def test_gradcheck_of_second_order_and_of_forward_mode(loss: str, gather: str) -> None:
    def inputs(rank: int) -> tuple[object, ...]:
        rows = 1 + 2 * rank
        return (
            normal(rows, 3, seed=rank),
            normal(rows, 3, seed=9 + rank),
            Input(SCALE, gm.R),
            Input(BIAS, gm.R),
        )

    def used(x: Tensor, y: Tensor, s: Tensor, b: Tensor) -> Tensor:
        unused = 0 * gm.replicate(s + b) if loss not in ("siglip",) else 0
        return of(loss, gather)(x, y, s, b) + unused

    report = gradcheck(used, inputs, world_size=2, objective="replicated", order=2, forward=True)
    assert {entry.mode for entry in report.entries} >= {"gradient", "second gradient", "tangent"}


@pytest.mark.parametrize(
    ("loss", "gather"),
    [case if case == ("clip", "ring") else pytest.param(*case, marks=pytest.mark.slow) for case in GATHERS],
)
def test_an_audit_finds_nothing(loss: str, gather: str) -> None:
    def build(group: Any = None, parts: Any = None) -> tuple[Callable[..., Tensor], tuple[Tensor, Tensor]]:
        rows = (2, 2, 2, 2) if parts is None else parts
        here = gm.axis(group)
        rows = rows if isinstance(rows, int) else rows[here.rank]
        x, y = normal(rows, 3, seed=here.rank), normal(rows, 3, seed=9 + here.rank)
        return of(loss, gather, axis=group), (x, y)

    found = audit(build, world_size=2)
    assert found.findings == ()
    assert found.arrows == ("V -> I",)


@pytest.mark.parametrize(("loss", "gather"), GATHERS)
def test_transforms_and_batches_of_losses_are_right(loss: str, gather: str, threads: Threads) -> None:
    x, y = normal(3, 5, 3, seed=1), normal(5, 3, seed=2)
    sizes = (2, 3)

    def batched() -> list[Tensor]:
        mine = gm.axis().slice(sizes)
        run = of(loss, gather)
        many = torch.func.vmap(torch.func.grad(run), in_dims=(0, None))(x[:, mine], y[mine])
        each = torch.stack([torch.func.grad(run)(one[mine], y[mine]) for one in x])
        _, tangent = torch.func.jvp(lambda z: run(z, y[mine]), (x[0, mine],), (x[1, mine],))
        one = x[0, mine].clone().requires_grad_()
        (along,) = torch.autograd.grad(run(one, y[mine]), one)
        moved = gm.all_reduce((along * x[1, mine]).sum(), dst=gm.I)
        return [many, each, tangent, moved]

    for many, each, tangent, moved in threads(2)(batched):
        torch.testing.assert_close(many, each)
        torch.testing.assert_close(tangent, moved)


class Largest(TorchDispatchMode):
    """The most elements that any result has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else [made]:
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return made


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of this process."""
    gm.init()
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("loss", "gather"), [case for case in GATHERS if case[0] in TABLES])
def test_no_more_than_a_tile_of_the_table_is_in_memory_at_any_order(
    alone: None, loss: str, gather: str
) -> None:
    x, y = normal(24, 4, seed=1).requires_grad_(), normal(24, 4, seed=2)
    with Largest() as seen:
        (first,) = torch.autograd.grad(of(loss, gather, 8)(x, y), x, create_graph=True)
        first.square().sum().backward()
    assert seen.elements <= 24 * 2 * 4 * 2  # both views, and as many again, side by side
    with Largest() as seen:
        of(loss, gather, 1024)(x, y)
    assert seen.elements >= 24 * 24


@pytest.mark.parametrize("gather", ["all", "ring"])
def test_products_of_bfloat16_are_summed_in_float32_also_under_autocast(
    gather: Gather, threads: Threads
) -> None:
    sizes = (7, 9)
    x, y = (F.normalize(normal(16, 32, seed=s), dim=1).bfloat16() for s in (1, 2))

    def run() -> tuple[Tensor, Tensor]:
        mine = gm.axis().slice(sizes)
        a = x[mine].clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = gm.nn.clip_loss(a, y[mine], 20.0, gather=gather, tile=4)
        loss.backward()
        assert a.grad is not None
        return loss.detach(), a.grad

    a = x.double().requires_grad_()
    expected = DENSE["clip"](a, y.double(), 20.0, None, None)
    expected.backward()
    found = threads(2)(run)
    assert a.grad is not None
    for value, _ in found:
        assert value.dtype is torch.float32
        torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-6, atol=0)
    grad = torch.cat([grad for _, grad in found])
    assert grad.dtype is torch.bfloat16
    torch.testing.assert_close(grad.double(), a.grad, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("gather", ["all", "ring"])
def test_only_communicated_values_are_rounded_to_comm_dtype(gather: Gather, threads: Threads) -> None:
    x, y = normal(6, 4, seed=1), normal(6, 4, seed=2)

    def run() -> Tensor:
        mine = gm.axis().slice(6)
        return gm.nn.clip_loss(x[mine], y[mine], 1.0, gather=gather, comm_dtype=torch.float32).detach()

    expected = DENSE["clip"](x, y, 1.0, None, None)
    for value in threads(2)(run):
        assert 1e-12 < float((value - expected).abs()) < 1e-6


@pytest.mark.parametrize("gather", ["all", "ring"])
def test_lossless_transport_dtype_changes_nothing(gather: Gather, threads: Threads) -> None:
    x, y = normal(6, 4, seed=1).requires_grad_(), normal(6, 4, seed=2).bfloat16().double().requires_grad_()

    def run() -> tuple[Tensor, ...]:
        mine = gm.axis().slice(6)
        a, b = (z.detach()[mine].clone().requires_grad_() for z in (x, y))
        loss = gm.nn.clip_loss(a, b, 20.0, gather=gather, comm_dtype=torch.bfloat16)
        return torch.autograd.grad(loss, (a, b))

    expected = torch.autograd.grad(DENSE["clip"](x, y, 20.0, None, None), (x, y))
    for parts, whole in zip(zip(*threads(2)(run), strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole)


@pytest.mark.parametrize(("loss", "gather"), GATHERS)
def test_it_may_stand_in_a_checkpoint_inside_ordered(loss: str, gather: str, threads: Threads) -> None:
    sizes, x, y = (2, 3), normal(5, 3, seed=1), normal(5, 3, seed=2)

    def run() -> list[Tensor]:
        mine, grads = gm.axis().slice(sizes), []
        for wrapped in (True, False):
            a = x[mine].clone().requires_grad_()
            with gm.ordered():
                fn = of(loss, gather, sizes=sizes, dst=gm.R)
                value = checkpoint(fn, a, y[mine], use_reentrant=False) if wrapped else fn(a, y[mine])
                gm.backward(value.square() if gm.rank() else None)
            assert a.grad is not None
            grads.append(a.grad)
        return grads

    for again, once in threads(2)(run):
        torch.testing.assert_close(again, once)


def test_derivatives_of_two_losses_that_ranks_take_differently_are_refused(threads: Threads) -> None:
    def run(gather: Gather) -> str:
        x = normal(2, 3, seed=gm.rank()).requires_grad_()
        a, b = (gm.nn.clip_loss(x, x.detach() + k, 1.0, gather=gather) for k in (1, 2))
        grads = [torch.autograd.grad(loss, x, create_graph=True)[0] for loss in (a, b)]
        with pytest.raises(gm.MismatchError) as found:
            grads[gm.rank()].square().sum().backward()
        return str(found.value)

    for gather in get_args(Gather):
        for text in threads(2)(run, gather):
            assert "rank 0" in text
            assert "rank 1" in text


class Towers(nn.Module):
    """Two encoders and a loss with what it learns, in one module."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.left, self.right, self.loss = nn.Linear(5, 4), nn.Linear(5, 4), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.loss(F.normalize(self.left(x), dim=1), F.normalize(self.right(y), dim=1))
        return out


@pytest.mark.parametrize(
    "loss",
    [
        lambda: gm.nn.ClipLoss(2.0, tile=2),
        lambda: gm.nn.ClipLoss(2.0, gather="ring", tile=2),
        lambda: gm.nn.SigLipLoss(2.0, -1.0),
        lambda: gm.nn.NTXentLoss(learnable=True, gather="ring"),
        gm.nn.VicRegLoss,
        gm.nn.BarlowTwinsLoss,
    ],
)
def test_training_on_ranks_is_training_on_one(loss: Callable[[], nn.Module]) -> None:
    assert same_as_single(
        lambda towers, x, y: towers(x, y),
        inputs=(Shard(normal(7, 5, seed=1), sizes=(4, 0, 3)), Shard(normal(7, 5, seed=2), sizes=(4, 0, 3))),
        module=lambda: Towers(loss()),
        world_size=3,
        steps=3,
        objective="replicated",
    ).ok


def test_supervised_training_on_ranks_is_training_on_one() -> None:
    loss = gm.nn.SupConLoss(0.5, learnable=True, tile=3)
    x, labels = normal(7, 5, seed=1), torch.tensor([0, 1, 0, 2, 1, 1, 3])
    assert same_as_single(
        lambda model, x, labels: model[1](model[0](x), labels),
        inputs=(Shard(x, sizes=(4, 0, 3)), Shard(labels, sizes=(4, 0, 3), constant=True)),
        module=lambda: nn.ModuleList([nn.Linear(5, 4), loss]),
        world_size=3,
        steps=3,
        objective="replicated",
    ).ok


def test_labels_may_be_left_out_and_views_are_then_each_others_pairs(threads: Threads) -> None:
    def run() -> tuple[Tensor, Tensor]:
        x, y = normal(2, 3, seed=gm.rank()), normal(2, 3, seed=5 + gm.rank())
        return gm.nn.sup_con_loss(torch.stack([x, y], 1), None, 0.5), gm.nn.nt_xent_loss(x, y, 0.5)

    for one, other in threads(2)(run):
        torch.testing.assert_close(one, other)


def test_a_label_that_is_alone_adds_nothing(threads: Threads) -> None:
    x = normal(4, 3)

    def run() -> Tensor:
        mine = gm.axis().slice((1, 3))
        return gm.nn.sup_con_loss(x[mine], torch.tensor([9, 1, 2, 1])[mine], 0.5)

    logits = (x @ x.T / 0.5).fill_diagonal_(-torch.inf)
    pair = -logits.log_softmax(1)[[1, 3], [3, 1]].sum() / 4
    for value in threads(2)(run):
        torch.testing.assert_close(value, pair)


def test_single_sample_without_negatives_has_zero_loss(threads: Threads) -> None:
    def run() -> tuple[float, float]:
        x = normal(gm.rank(), 3).requires_grad_()  # one sample on rank 1
        loss = gm.nn.sup_con_loss(x, torch.zeros(gm.rank(), dtype=torch.long))
        loss.backward()
        assert x.grad is not None
        return loss.item(), x.grad.abs().sum().item()

    assert threads(2)(run) == [(0, 0)] * 2


def test_large_scales_neither_overflow_nor_lose_the_gradient(threads: Threads) -> None:
    x = F.normalize(normal(6, 3, seed=1), dim=1)
    y = F.normalize(normal(6, 3, seed=2), dim=1)

    def run(gather: Gather) -> tuple[Tensor, Tensor]:
        mine = gm.axis().slice(6)
        a = x[mine].float().requires_grad_()
        loss = gm.nn.clip_loss(a, y[mine].float(), 1000.0, gather=gather, tile=2)
        loss.backward()
        assert a.grad is not None
        return loss.detach(), a.grad

    a = x.clone().requires_grad_()
    expected = DENSE["clip"](a, y, 1000.0, None, None)
    expected.backward()
    assert a.grad is not None
    for gather in ("all", "ring"):
        found = threads(2)(run, gather)
        torch.testing.assert_close(found[0][0].double(), expected.detach(), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(torch.cat([g for _, g in found]).double(), a.grad, rtol=1e-3, atol=1e-3)


def test_each_mesh_axis_has_a_separate_batch(threads: Threads) -> None:
    x, y = normal(4, 3, seed=1), normal(4, 3, seed=2)

    def run() -> tuple[int, Tensor]:
        gm.mesh(dp=2, tp=2)
        mine = gm.axis("dp").slice(4)
        tp = gm.axis("tp").rank
        return tp, gm.nn.clip_loss(x[mine] + tp, y[mine], 1.0, "dp", gather=get_args(Gather)[tp])

    for tp, value in threads(4)(run):
        torch.testing.assert_close(value, DENSE["clip"](x + tp, y, 1.0, None, None))


WRONG: dict[str, tuple[Callable[[], Tensor], str]] = {
    "no rows": (
        lambda: gm.nn.clip_loss(normal(0, 3), normal(0, 3), 1.0),
        "cannot compute the mean over zero samples",
    ),
    "no matrix": (
        lambda: gm.nn.clip_loss(normal(3), normal(3), 1.0),
        "left is not a floating-point tensor with 2 dimensions",
    ),
    "other rows": (
        lambda: gm.nn.siglip_loss(normal(2, 3), normal(3, 3), 1.0),
        "right does not match the other embeddings",
    ),
    "other dtype": (
        lambda: gm.nn.nt_xent_loss(normal(2, 3), normal(2, 3).float()),
        "right does not match the other embeddings",
    ),
    "whole numbers": (
        lambda: gm.nn.vic_reg_loss(normal(2, 3).long(), normal(2, 3).long()),
        "is not a floating-point tensor",
    ),
    "one sample": (lambda: _on_first(gm.nn.barlow_twins_loss), "cannot compute the variance of one sample"),
    "scale": (lambda: gm.nn.clip_loss(normal(2, 3), normal(2, 3), normal(2)), "scale is not a real number"),
    "bias": (lambda: gm.nn.siglip_loss(normal(2, 3), normal(2, 3), 1.0, "x"), "bias is not a real number"),  # type: ignore[arg-type]
    "gather": (
        lambda: gm.nn.clip_loss(normal(2, 3), normal(2, 3), 1.0, gather="some"),  # type: ignore[arg-type]
        "gather must be 'all' or 'ring'",
    ),
    "tile": (
        lambda: gm.nn.clip_loss(normal(2, 3), normal(2, 3), 1.0, tile=0),
        "tile must be a positive int or None",
    ),
    "dst": (lambda: gm.nn.clip_loss(normal(2, 3), normal(2, 3), 1.0, dst=gm.V), "dst must be gm.R or gm.I"),  # type: ignore[arg-type]
    "sizes": (
        lambda: gm.nn.clip_loss(normal(2, 3), normal(2, 3), 1.0, sizes=(2, 3)),
        "sizes does not match this rank",
    ),
    "labels": (
        lambda: gm.nn.sup_con_loss(normal(2, 3), torch.zeros(2)),
        "labels does not have one integer for each sample",
    ),
}


def _on_first(loss: Callable[..., Tensor]) -> Tensor:
    return loss(normal(1 - gm.rank(), 3), normal(1 - gm.rank(), 3))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_raises_on_the_rank_and_notifies_the_others(name: str, threads: Threads) -> None:
    call, problem = WRONG[name]

    def everywhere() -> str:
        with pytest.raises(gm.GradmeshError) as found:
            call()
        if name == "sizes" and gm.rank() == 0:
            return f"{problem}: nn."
        return str(found.value)

    def on_one() -> str:
        x = normal(2, 3)
        with pytest.raises(gm.GradmeshError) as found:
            call() if gm.rank() else gm.nn.clip_loss(x, x, 1.0)
        return str(found.value)

    for text in threads(2)(everywhere):
        assert problem in text
        assert "nn." in text
    if name not in ("no rows", "one sample"):
        heard, text = threads(2)(on_one)
        assert (
            problem in text or "bias" in problem or "label" in problem
        )  # another loss than the other rank's
        assert "do not match" in heard


def test_a_learned_scale_is_kept_below_its_bound_in_training_alone(alone: None) -> None:
    loss, x = gm.nn.ClipLoss(50.0, max_scale=10.0), F.normalize(normal(3, 3).float(), dim=1)
    loss.eval()(x, x)
    assert loss.scale.item() == pytest.approx(50)
    loss.train()(x, x)
    assert loss.scale.item() == pytest.approx(10)
    assert not gm.nn.ClipLoss(learnable=False).log_scale.requires_grad
    assert "gather='ring'" in repr(gm.nn.SigLipLoss(gather="ring"))


def compiled(names: list[tuple[str, str]], backend: str, tile: int | None) -> list[str]:
    sizes, wrong = (2, 3), []
    mine = gm.axis().slice(sizes)
    for name, gather in names:
        leaves = [normal(5, 3, seed=s)[mine].clone().requires_grad_() for s in (1, 2)]
        run = of(name, gather, tile, sizes=sizes)
        expected = torch.autograd.grad(run(*leaves), leaves)
        torch._dynamo.reset()
        found = torch.autograd.grad(torch.compile(run, fullgraph=True, backend=backend)(*leaves), leaves)
        if not all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, expected, strict=True)):
            wrong.append(f"{name}, {gather}")
    return wrong


@pytest.mark.processes
@pytest.mark.parametrize(
    ("names", "backend", "tile"),
    [
        ([("barlow_twins", "all")], "eager", 2),
        pytest.param([(loss, "all") for loss in TABLES], "aot_eager", None, marks=pytest.mark.slow),
        pytest.param(GATHERS, "aot_eager", 2, marks=pytest.mark.slow),
        pytest.param(GATHERS, "inductor", 2, marks=pytest.mark.slow),
    ],
    ids=["traced", "one_tile", "aot_eager", "inductor"],
)
def test_compiled_whole_it_is_the_eager_one(names: Any, backend: str, tile: int | None, worlds: Any) -> None:
    assert worlds(2, "shm", 240).run(compiled, names, backend, tile) == [[], []]


class Products(TorchDispatchMode):
    """How many matrix products have a table's number of multiplications."""

    def __init__(self, multiplications: int) -> None:
        super().__init__()
        self.multiplications, self.count = multiplications, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            (rows, inner), (_, cols) = args[0].shape, args[1].shape
            self.count += rows * inner * cols == self.multiplications
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss", sorted(TABLES))
def test_a_table_of_one_tile_is_made_once_for_a_step(alone: None, loss: str) -> None:
    x, y = normal(24, 4, seed=1).requires_grad_(), normal(24, 4, seed=2).requires_grad_()
    views = 2 if loss in ("nt_xent", "sup_con") else 1
    with Products(24 * views * 24 * views * 4) as whole:
        of(loss, "all", None)(x, y).backward()
    assert whole.count == 3  # the table, and the gradients of its rows and of its columns


@pytest.mark.parametrize(("rows", "whole"), [(2048, True), (2049, False)])
def test_by_default_a_table_is_in_memory_up_to_a_size_and_then_a_tile_of_it(
    alone: None, rows: int, whole: bool
) -> None:
    x, y = (normal(rows, 2, seed=s, dtype=torch.float32).requires_grad_() for s in (1, 2))
    with Largest() as seen:
        gm.nn.clip_loss(x, y, 2.0).backward()
    assert seen.elements == (2**22 if whole else 2**20)
