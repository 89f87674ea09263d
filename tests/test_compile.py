"""Verbs inside `torch.compile(fullgraph=True)`: values and gradients are those of eager mode."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

import gradmesh as gm
from gradmesh.autograd.traced import collective, decode, encode
from gradmesh.ops.all_gather import AllGather
from gradmesh.ops.registry import REGISTRY
from gradmesh.ops.sizes import EQUAL

Processes = Callable[[int], Callable[..., list[Any]]]

PICKED = ({1: torch.tensor([3, 0])}, {0: torch.tensor([2]), 1: torch.tensor([1, 1, 0])})

VERBS: dict[str, Callable[[Tensor], Tensor]] = {
    "all_gather": lambda x: gm.all_gather(x, "tp"),
    "all_gather to I, dim 1": lambda x: gm.all_gather(x, "tp", dim=-1, dst=gm.I),
    "all_gather, uneven": lambda x: gm.all_gather(x[: 1 + gm.axis("tp").rank], "tp", sizes=(1, 2)),
    "all_gather, nothing on a rank": lambda x: gm.all_gather(x[: gm.axis("tp").rank], "tp", sizes=(0, 1)),
    "all_gather in bfloat16": lambda x: gm.all_gather(x, "tp", comm_dtype=torch.bfloat16),
    "reduce_scatter": lambda x: gm.reduce_scatter(x, "tp"),
    "reduce_scatter, uneven": lambda x: gm.reduce_scatter(x, "tp", sizes=(4, 0)),
    "all_reduce": lambda x: gm.all_reduce(x, "tp", dst=gm.R),
    "all_reduce to I": lambda x: gm.all_reduce(x, "tp", dst=gm.I),
    "mean": lambda x: gm.all_reduce(x, "tp", op="mean", dst=gm.R),
    "max": lambda x: gm.all_reduce(x, "tp", op="max", dst=gm.R),
    "prod": lambda x: gm.all_reduce(x, "tp", op="prod", dst=gm.R),
    "logsumexp": lambda x: gm.all_reduce(x, "tp", op="logsumexp", dst=gm.R),
    "replicate": lambda x: gm.replicate(x, "tp"),
    "shard": lambda x: gm.shard(x, "tp"),
    "shard of R": lambda x: gm.shard(x, "tp", src=gm.R, sizes=(1, 3)),
    "convert": lambda x: gm.convert(x, "tp", src=gm.R, dst=gm.P),
    "all_to_all": lambda x: gm.all_to_all(x, "tp"),
    "all_to_all of dims": lambda x: gm.all_to_all(x, "tp", split_dim=1, concat_dim=0),
    "all_to_all, uneven": lambda x: gm.all_to_all(
        x,
        "tp",
        split_sizes=((1, 3), (4, 0))[gm.axis("tp").rank],
        concat_sizes=((1, 4), (3, 0))[gm.axis("tp").rank],
    ),
    "broadcast": lambda x: gm.broadcast(x, "tp"),
    "reduce": lambda x: gm.reduce(x, "tp", root=1),
    "gather": lambda x: gm.gather(x, "tp", root=1),
    "scatter": lambda x: gm.scatter(x if gm.axis("tp").rank else x[:0], "tp", root=1, sizes=(1, 3)),
    "shift": lambda x: gm.shift(x, "tp", wrap=False),
    "permute": lambda x: gm.permute(x, "tp", pairs=[(0, 1)]),
    "halo_exchange": lambda x: gm.halo_exchange(x, "tp", halo=(1, 0)),
    "neighbor_all_to_all": lambda x: gm.neighbor_all_to_all(
        x,
        "tp",
        send_rows=PICKED[gm.axis("tp").rank],
        receive_counts=({1: 1}, {0: 2, 1: 3})[gm.axis("tp").rank],
    ),
    "all_gather, sizes asked for": lambda x: gm.all_gather(
        x[: 3 + gm.axis("tp").rank].t().contiguous(), "tp", dim=1, sizes="auto"
    ),
    "all_to_all, sizes asked for": lambda x: gm.all_to_all(
        x[: 3 + gm.axis("tp").rank], "tp", split_dim=1, concat_dim=0, concat_sizes="auto"
    ),
    "shift, two at once": lambda x: torch.stack(gm.shift((x, 2 * x), "tp")),
    "all_gather, two at once": lambda x: torch.cat(
        [t.reshape(-1) for t in gm.all_gather((x, x[0]), "tp", dim=-1)]
    ),
    "mean, two at once": lambda x: gm.all_reduce({"k": x, "v": x[0]}, "tp", op="mean", dst=gm.R)["k"],
    "scan": lambda x: gm.scan(x, "tp"),
    "exscan": lambda x: gm.exscan(x, "tp", reverse=True),
}

if torch.__version__ < "2.11":  # it refuses those whose sizes are asked for, as a test below expects
    VERBS = {name: verb for name, verb in VERBS.items() if "asked for" not in name}


def compare(backend: str, names: list[str]) -> dict[str, str]:
    """Loss and gradient of each verb, compiled and not, on this rank; what differs, by verb."""
    gm.mesh(tp=-1)
    wrong = {}
    for name in names:
        verb = VERBS[name]
        weight = 1 + gm.axis("tp").rank

        def loss(x: Tensor, verb: Callable[[Tensor], Tensor] = verb, weight: int = weight) -> Tensor:
            return weight * (verb(x.sin()) ** 2).sum()

        generator = torch.Generator().manual_seed(gm.axis("tp").rank)
        x = torch.randn(4, 2, dtype=torch.float64, generator=generator, requires_grad=True)
        with gm.ordered():
            expected = loss(x)
            (expected_grad,) = gm.grad(expected, x)
        torch._dynamo.reset()
        got = torch.compile(loss, fullgraph=True, backend=backend)(x)
        (grad,) = torch.autograd.grad(got, x)
        if not torch.allclose(got, expected, rtol=1e-13) or not torch.allclose(
            grad, expected_grad, rtol=1e-13
        ):
            wrong[name] = f"{got} for {expected}, {grad} for {expected_grad}"
    return wrong


OF_EACH_KIND = [
    "all_gather to I, dim 1",
    "all_gather, uneven",
    "reduce_scatter",
    "all_reduce to I",
    "logsumexp",
    "shard of R",
    "all_to_all, uneven",
    "reduce",
    "scatter",
    "all_gather, sizes asked for",
    "all_to_all, sizes asked for",
    "neighbor_all_to_all",
    "mean, two at once",
    "exscan",
]
OF_INDUCTOR = ["all_gather, nothing on a rank", "max"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("aot_eager", [name for name in OF_EACH_KIND if name in VERBS]),
        pytest.param("inductor", OF_INDUCTOR, marks=pytest.mark.slow),
        pytest.param("aot_eager", list(VERBS), marks=pytest.mark.slow),
        pytest.param("eager", list(VERBS), marks=pytest.mark.slow),
        pytest.param("inductor", list(VERBS), marks=pytest.mark.slow),
    ],
    ids=["aot_eager", "inductor", "aot_eager-all", "eager-all", "inductor-all"],
)
def test_a_compiled_verb_is_the_eager_one(backend: str, names: list[str], compiling: Processes) -> None:
    assert compiling(2)(compare, backend, names) == [{}, {}]


def asked_for_outside() -> list[str]:
    """What a compiler says to sizes on which the program itself would depend; and whether it is right outside of it."""
    gm.mesh(tp=-1)
    said = []
    verbs = [
        lambda x: gm.halo_exchange(x, "tp", halo=1, sizes="auto"),
        lambda x: gm.all_gather(x.t(), "tp", dim=1, sizes="auto"),
    ]
    if torch.__version__ < "2.11":
        verbs.append(lambda x: gm.all_gather(x, "tp", sizes="auto"))
    for verb in verbs:
        x = torch.randn(3 + gm.axis("tp").rank, 2, dtype=torch.float64)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(verb, backend="aot_eager")(x), verb(x))
        torch._dynamo.reset()
        try:
            torch.compile(verb, backend="aot_eager", fullgraph=True)(x)
        except Exception as error:
            said.append(str(error))
    return said


@pytest.mark.processes
def test_sizes_on_which_a_program_would_depend_are_asked_for_outside_of_it(compiling: Processes) -> None:
    for said in compiling(2)(asked_for_outside):
        assert len(said) == 2 + (torch.__version__ < "2.11")
        assert "use explicit sizes, or call the verb outside of the compiled function" in said[0]
        assert "use x.contiguous()" in said[1]
        assert all("in a program compiled before torch 2.11" in each for each in said[2:])


def changing_sizes() -> list[bool]:
    gm.mesh(tp=-1)
    rank = gm.axis("tp").rank

    def loss(x: Tensor, sizes: tuple[int, int]) -> Tensor:
        return ((1 + rank) * gm.all_gather(x.sin(), "tp", sizes=sizes) ** 2).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    right = []
    for step, sizes in enumerate([(3, 4), (5, 7), (6, 2), (9, 8)]):
        # Two programs: one for the first sizes, one for all others.
        with torch.compiler.set_stance("default" if step < 2 else "fail_on_recompile"):
            x = torch.ones(sizes[rank], dtype=torch.float64, requires_grad=True)
            (grad,) = torch.autograd.grad(compiled(x, sizes), x)
            (expected,) = torch.autograd.grad(loss(x, sizes), x)
            right.append(torch.equal(grad, expected))
    return right


@pytest.mark.processes
def test_sizes_that_change_from_step_to_step_are_compiled_once(compiling: Processes) -> None:
    assert compiling(2)(changing_sizes) == [[True] * 4] * 2


def targets(reorderable: bool) -> list[str]:
    gm.mesh(tp=-1)
    seen: list[str] = []

    def look(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if node.op == "call_function":
                seen.extend(str(part) for part in (node.target, *node.args[1:2]))
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    def loss(x: Tensor) -> Tensor:
        y = gm.all_gather(x.sin(), "tp")
        return (gm.all_reduce(y, "tp", dst=gm.R) * gm.all_to_all(y, "tp")).sum() + gm.scan(x, "tp").sum()

    torch._dynamo.reset()
    x = torch.ones(2, requires_grad=True)
    compiled = torch.compile(loss, fullgraph=True, backend=aot_autograd(fw_compiler=look, bw_compiler=look))
    with gm.reorderable() if reorderable else contextlib.nullcontext():
        compiled(x).backward()
    with gm.ordered():
        y = x.detach().requires_grad_()
        gm.backward(loss(y))
    assert x.grad is not None
    assert y.grad is not None
    assert torch.allclose(x.grad, y.grad)
    return [name for name in seen if "c10d" in name or "gradmesh" in name]


@pytest.mark.processes
def test_a_compiler_sees_functional_collectives_only_where_it_may_move_them(compiling: Processes) -> None:
    for seen in compiling(2)(targets, False):
        assert seen == ["gradmesh.collective.default"] * 8
    for seen in compiling(2)(targets, True):
        for op in ("all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor"):
            assert f"_c10d_functional.{op}.default" in seen
        assert seen.count("gradmesh.collective.default") == 2


def refused(how: str) -> str:
    gm.mesh(tp=-1)
    x = torch.ones(2, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: gm.all_gather(x, "tp").sum(), fullgraph=True, backend="eager")

    def run() -> None:
        with torch.autograd.forward_ad.dual_level():
            compiled(torch.autograd.forward_ad.make_dual(x, x) if how == "a dual tensor" else x)

    with pytest.raises(Exception, match="gradmesh") as caught:  # dynamo wraps it in an error of its own
        run()
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("forward mode", "forward mode is not supported inside torch.compile"),
        (
            "a dual tensor",
            "forward mode is not supported|wrap a dual tensor",
        ),  # newer torch refuses it before gradmesh does
    ],
)
def test_uncompilable_call_raises(how: str, text: str, processes: Processes) -> None:
    assert all(re.search(text, got) for got in processes(2)(refused, how))


def checked_op() -> None:
    op = AllGather(gm.axis(), 0, EQUAL)
    # Beside the result there is the call's number, which no two runs have in common where calls are compared.
    with gm.check(0):
        torch.library.opcheck(collective, (torch.ones(2), *encode(op), "", None, False))


@pytest.mark.processes
def test_opcheck_accepts_the_opaque_op(processes: Processes) -> None:
    processes(2)(checked_op)


def unlike_themselves() -> list[str]:
    axis = gm.axis()
    wrong = []
    for row in REGISTRY:
        for op, shape in row.examples(axis):
            again = decode(encode(op))
            if (again, again.out_shape(shape), again.called) != (op, op.out_shape(shape), op.called):
                wrong.append(f"{again} for {op}")
    return wrong


def test_every_op_survives_a_round_trip_through_its_description(threads: Processes) -> None:
    assert threads(3)(unlike_themselves) == [[]] * 3


class Layer(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return gm.all_gather(x * 2, "tp") + gm.scan(x.sum(), "tp")


def exported() -> tuple[Tensor, Tensor]:
    gm.mesh(tp=-1)
    x = torch.ones(3) + gm.axis("tp").rank
    program = torch.export.export(Layer(), (x,))
    return program.module()(x), Layer()(x)


@pytest.mark.processes
def test_a_module_with_verbs_can_be_exported(processes: Processes) -> None:
    for got, expected in processes(2)(exported):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("row", range(len(REGISTRY)), ids=[row.call for row in REGISTRY])
def test_fake_and_meta_tensors_get_their_shape_without_communication(row: int) -> None:
    from gradmesh.autograd.rule import apply

    # Nothing is sent: the axis has no group.
    axis = gm.Axis("any", 1, 3, None)  # type: ignore[arg-type]
    for op, shape in REGISTRY[row].examples(axis):
        with FakeTensorMode():
            x = torch.empty(tuple(shape), dtype=torch.bfloat16, requires_grad=True)
            y = apply(op, x)
            y.sum().backward()
            assert (tuple(y.shape), y.dtype) == (op.out_shape(shape), torch.bfloat16)
            assert x.grad is not None
            assert x.grad.shape == x.shape
        assert apply(op, torch.empty(tuple(shape), device="meta")).shape == op.out_shape(shape)


class Gathering(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gm.all_gather(self.up(x)))


def compiled_ddp(**options: Any) -> float:
    """How far gradients of a compiled DDP module are from those of an uncompiled one, over rows of changing number."""
    module, plain = (
        DistributedDataParallel(Gathering(), **options),
        DistributedDataParallel(Gathering(), **options),
    )
    compiled = torch.compile(module, backend="aot_eager")
    draw = torch.Generator().manual_seed(gm.rank())
    for step in range(4):
        x = torch.randn(2 + step, 4, generator=draw)
        for model in (compiled, plain):
            (model(x).sum() * (1 + gm.rank())).backward()
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    return max((p.grad - q.grad).abs().max().item() for p, q in pairs)  # type: ignore[operator]


@pytest.mark.processes
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_a_compiled_ddp_module_is_trained_for_several_steps(
    options: dict[str, bool], compiling: Processes
) -> None:
    for apart in compiling(2)(functools.partial(compiled_ddp, **options)):
        assert apart < 1e-5


def called_by_torch() -> list[float]:
    """Calls of torch.distributed at which Dynamo breaks the graph: torch calls the process group while it runs."""
    rank = gm.rank()

    def gathered(y: Tensor) -> Tensor:
        parts = [torch.empty_like(y) for _ in range(2)] if rank == 0 else None
        dist.gather(y, parts)
        return torch.cat(parts) if parts else y

    def started(y: Tensor) -> Tensor:
        work = dist.broadcast(y, 0, async_op=True)
        assert work is not None
        work.wait()
        return y

    def sent(y: Tensor) -> Tensor:
        came = torch.empty_like(y)
        ends = [dist.P2POp(dist.isend, y, 1 - rank), dist.P2POp(dist.irecv, came, 1 - rank)]
        for work in dist.batch_isend_irecv(ends):
            work.wait()
        return came

    found = []
    for call in (gathered, started, sent):
        for rows in (2, 3):
            x = torch.full((rows,), 1.0 + rank)
            found.append(torch.compile(call, backend="aot_eager")(x * 2).sum().item())
        dist.barrier()
    return found


@pytest.mark.processes
def test_graph_break_can_call_the_custom_backend(compiling: Processes) -> None:
    assert compiling(2)(called_by_torch) == [[12, 18, 4, 6, 8, 12], [8, 12, 4, 6, 4, 6]]


def future_in_a_compiled_program() -> list[float]:
    @torch.compile(backend="aot_eager")
    def doubled(x: Tensor) -> Tensor:
        pending = gm.all_gather(x * 2, async_op=True)
        return pending.future().wait() + pending.wait()

    return doubled(torch.ones(2)).tolist()


@pytest.mark.processes
def test_a_pending_call_has_a_future_in_a_compiled_program(compiling: Processes) -> None:
    assert compiling(2)(future_in_a_compiled_program) == [[4.0] * 4] * 2


def scattered_without_sizes() -> tuple[list[float], list[float]]:
    @torch.compile(backend="aot_eager")
    def scattered(x: torch.Tensor) -> torch.Tensor:
        return gm.scatter(x, root=1) * 2

    x = torch.arange(7.0) if gm.rank() == 1 else torch.empty(0)
    y = scattered(x.requires_grad_())
    (y * (1 + gm.rank())).sum().backward()
    assert x.grad is not None
    return y.tolist(), x.grad.tolist()


@pytest.mark.torch_at_least("2.11", "Dynamo compiles on one thread at a time")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch reads it when it follows a graph break
def test_sizes_are_exchanged_when_a_compiled_program_runs_and_not_while_it_is_compiled(
    threads: Processes,
) -> None:
    nothing: list[float] = []
    whole = [2.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0]
    expected = [([0.0, 2.0, 4.0], nothing), ([6.0, 8.0], whole), ([10.0, 12.0], nothing)]
    assert threads(3)(scattered_without_sizes) == expected
