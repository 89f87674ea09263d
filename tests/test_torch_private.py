"""What gradmesh relies on in torch's private names: a torch that changes it fails here, by name."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import math
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch._functorch import eager_transforms, predispatch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import gradmesh as gm
from gradmesh import _torch
from gradmesh._torch import fsdp, names, operators
from gradmesh._torch import groups as own_rendezvous
from gradmesh.ops.registry import REGISTRY


def test_the_groups_of_a_process_are_reached_through_c10d_world() -> None:
    assert type(c10d._world) is c10d._World
    assert dist.group.WORLD is c10d._world.default_pg
    assert c10d._backend is None or isinstance(c10d._backend, str)
    assert hasattr(c10d, "_default_pg_init_method")


def test_world_of_a_rank_shares_no_field() -> None:
    fields = {name for name, value in vars(c10d._World).items() if isinstance(value, property)}
    fields -= {"pg_config_info"}  # computed from the others
    one, other = _torch._RankWorld(), _torch._RankWorld()
    for name in fields:
        mine = getattr(one, name)
        assert not mine, f"{name} is not empty in a new world"
        if mine is not None and not isinstance(mine, int):
            assert mine is not getattr(other, name), f"{name} is shared by two ranks"
            assert mine is not getattr(c10d._world, name), f"{name} is the process's own"


def test_a_tensor_that_has_left_its_transform_is_gathered_with_its_gradient() -> None:
    def on_each_rank() -> tuple[list[float], list[float]]:
        left: list[torch.Tensor] = []

        def summed(inner: torch.Tensor) -> torch.Tensor:
            left.append(inner)
            return inner.sum()

        x = torch.tensor([1.0, 2.0]).requires_grad_()
        torch.func.grad(summed)(x)
        y = gm.all_gather(left[0])
        ((1 + gm.rank()) * y).sum().backward()
        return y.tolist(), [] if x.grad is None else x.grad.tolist()

    assert gm.launch(on_each_rank, 2, backend="threads") == [([1.0, 2.0, 1.0, 2.0], [3.0, 3.0])] * 2


def test_a_hook_that_frees_what_one_call_saved_leaves_the_other_calls_theirs() -> None:
    def freed(saved: torch.Tensor) -> torch.Tensor:
        kept = saved.clone()
        saved.untyped_storage().resize_(0)
        return kept

    def on_each_rank() -> list[float]:
        x, gradients = torch.tensor([1.0, 2.0]).requires_grad_(), list[float]()
        for pack in (freed, torch.clone):
            with saved_tensors_hooks(pack, lambda kept: kept):
                y = gm.all_gather(x)
            gradients += torch.autograd.grad(((1 + gm.rank()) * y).sum(), x)[0].tolist()
        return gradients

    assert gm.launch(on_each_rank, 2, backend="threads") == [[3.0] * 4] * 2


def test_a_tool_that_replaces_apply_of_functions_sees_those_of_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    function, seen = torch.autograd.Function, list[str]()

    def apply(cls: Any, *args: Any) -> Any:
        seen.append(cls.__name__)
        return torchs.__get__(None, cls)(*args)

    def on_each_rank() -> list[float]:
        x = torch.ones(1, requires_grad=True)
        return torch.autograd.grad(gm.all_gather(x).sum(), x)[0].tolist()

    torchs = inspect.getattr_static(function, "apply")
    monkeypatch.setattr(function, "apply", classmethod(apply))
    assert gm.launch(on_each_rank, 2, backend="threads") == [[2.0]] * 2
    assert len(seen) == 2


def test_a_group_can_be_aborted() -> None:
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)  # type: ignore[attr-defined]
    assert _torch.groups._ABORT is not None
    _torch.abort_group(group)


def test_the_registry_in_cpp_has_a_mode_for_threads() -> None:
    assert hasattr(torch._C._distributed_c10d, "_set_thread_isolation_mode")


def test_forward_mode_counts_levels_in_globals_of_its_modules() -> None:
    assert forward_ad._current_level == -1
    assert eager_transforms.JVP_NESTING == 0
    assert hasattr(predispatch, "DECOMPOSITIONS_LOCK")
    seen: list[tuple[int, int]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append((forward_ad._current_level, eager_transforms.JVP_NESTING))
        return x

    torch.func.jvp(look, (torch.ones(1),), (torch.ones(1),))
    assert seen == [(0, 1)]


def test_the_level_that_cpp_gives_is_0_and_a_second_one_is_refused() -> None:
    assert torch._C._enter_dual_level() == 0
    try:
        with pytest.raises(RuntimeError, match="Nested forward mode"):
            torch._C._enter_dual_level()
    finally:
        torch._C._exit_dual_level(level=0)


def test_dual_level_calls_the_functions_of_its_module() -> None:
    assert "enter_dual_level()" in inspect.getsource(forward_ad.dual_level.__enter__)
    assert "exit_dual_level()" in inspect.getsource(forward_ad.dual_level.__exit__)


def test_shared_level_reads_per_thread() -> None:
    with _torch.thread_isolation(), forward_ad.dual_level():
        level = forward_ad._current_level
        assert (level == 0, level != 0, level < 0, level <= 0, level > -1, level >= 0) == (
            True,
            False,
            False,
            True,
            True,
            True,
        )
        elsewhere: list[bool] = []
        thread = threading.Thread(
            target=lambda: elsewhere.extend(
                [level == -1, level != 0, level < 0, level <= -1, level > -1, level >= 0]
            )
        )
        thread.start()
        thread.join()
        assert elsewhere == [True, True, True, True, False, False]
    assert forward_ad._current_level == -1
    assert type(forward_ad._current_level) is int


def test_transforms_active_sees_a_transform_and_a_level() -> None:
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.transforms_active())
        return x.sum()

    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    with forward_ad.dual_level():
        look(torch.ones(2))
    look(torch.ones(2))
    assert seen == [True, True, True, False]


def test_modes_of_both_kinds_are_seen_while_they_are_on() -> None:
    class _Dispatch(TorchDispatchMode):
        pass

    class _Function(TorchFunctionMode):
        pass

    assert not _torch.modes_active()
    for mode in (_Dispatch, _Function):
        with mode():
            assert _torch.modes_active()
        assert not _torch.modes_active()


def test_without_autograd_switches_both_modes_off_and_back() -> None:
    x = torch.ones(1, requires_grad=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(1), torch.ones(1))
        y, z = _torch.without_autograd(lambda: (x * 2, dual * 2))
        assert not y.requires_grad
        assert forward_ad.unpack_dual(z).tangent is None
        assert (x * 2).requires_grad
        assert forward_ad.unpack_dual(dual * 2).tangent is not None
    with torch.no_grad():
        _torch.without_autograd(lambda: None)
        assert not torch.is_grad_enabled()


def test_a_profiler_that_runs_sets_a_flag_of_its_module() -> None:
    seen = [_torch.profiler_on()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        seen.append(_torch.profiler_on())
    with torch.autograd.profiler.profile():
        seen.append(_torch.profiler_on())
    seen.append(_torch.profiler_on())
    assert seen == [False, True, True, False]


def test_a_named_range_is_seen_by_the_profiler_and_by_no_mode() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops.append(str(func))
            return func(*args, **(kwargs or {}))

    ops: list[str] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        with _torch.named_range("outside"):
            pass
        with Mode(), _torch.named_range("inside"):
            torch.ones(1).sin()
    assert not [op for op in ops if "record" in op]
    assert "aten.sin.default" in ops
    assert {"outside", "inside"} <= {event.name for event in profiled.events() or ()}


def test_batched_gradients_come_as_a_legacy_batch_that_can_be_taken_out() -> None:
    seen: list[tuple[bool, tuple[int, ...]]] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            def work(whole: torch.Tensor) -> torch.Tensor:
                seen.append((_torch.is_legacy_batched(g), tuple(whole.shape)))
                return 2 * whole

            return _torch.on_legacy_batch(g, work)

    x = torch.ones(3, requires_grad=True)
    (grads,) = torch.autograd.grad(Look.apply(x), x, torch.eye(3)[:2], is_grads_batched=True)
    assert seen == [(True, (2, 3))]
    assert torch.equal(grads, 2 * torch.eye(3)[:2])
    assert not _torch.is_legacy_batched(x)


def test_backward_pass_checkpoint_and_its_kind_are_detected() -> None:
    seen: list[tuple[bool, bool, bool]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append((_torch.in_backward(), _torch.saves_for_a_checkpoint(), _torch.in_reentrant_checkpoint()))
        return x.sin()

    x = torch.ones(1, requires_grad=True)
    look(x)
    for reentrant in (False, True):
        checkpoint(look, x, use_reentrant=reentrant).backward()
    plain, first, again, hidden, entered = seen
    assert plain == (False, False, False)
    assert (first, again) == ((False, True, False), (True, True, False))
    assert (hidden, entered) == ((False, False, True), (True, False, True))


class _Numbered(torch.autograd.Function):
    seen: ClassVar[list[tuple[int | None, int | None]]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        _Numbered.seen.append((_torch.function_forward(), _torch.function_backward()))
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        ctx.saved_tensors  # noqa: B018  a checkpoint computes again here
        _Numbered.seen.append((_torch.function_forward(), _torch.function_backward()))
        return grad * 2


def test_function_is_identified_by_its_node_number_in_both_passes_of_every_order() -> None:
    x = torch.ones(1, requires_grad=True)
    for create_graph in (False, True):
        _Numbered.seen.clear()
        y: torch.Tensor = _Numbered.apply(x.sin())
        assert y.grad_fn is not None
        number = y.grad_fn._sequence_nr()
        torch.autograd.grad(y, x, create_graph=create_graph)
        assert _Numbered.seen == [(number, None), (None, number)]
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert (_torch.function_forward(), _torch.function_backward()) == (None, None)


def test_recomputation_of_a_checkpoint_is_a_forward() -> None:
    x = torch.ones(1, requires_grad=True)
    y = checkpoint(lambda x: _Numbered.apply(x).sin(), x, use_reentrant=False)
    _Numbered.seen.clear()
    y.backward()
    (again, within), (_, number) = _Numbered.seen
    assert again is not None
    assert within is None
    assert number is not None
    assert number != again


def test_transforms_distinguish_vmap_from_derivatives() -> None:
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.only_vmap_active())
        return x.sum()

    x = torch.ones(2, 2)
    torch.func.vmap(look)(x)
    torch.func.grad(look)(x)
    torch.func.vmap(torch.func.grad(look))(x)
    assert seen == [True, False, False]


def test_fake_and_meta_tensors_are_known_and_a_parameter_is_neither() -> None:
    assert _torch.is_fake(torch.empty(1, device="meta"))
    with FakeTensorMode():
        assert _torch.is_fake(torch.empty(1))
    assert not _torch.is_fake(torch.nn.Parameter(torch.ones(1)))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("all_gather_into_tensor", ["input", "group_size", "group_name"]),
        ("reduce_scatter_tensor", ["input", "reduce_op", "group_size", "group_name"]),
        ("all_to_all_single", ["input", "output_split_sizes", "input_split_sizes", "group_name"]),
        ("all_reduce", ["input", "reduce_op", "group_name"]),
        ("broadcast", ["input", "src", "group_name"]),
        ("wait_tensor", ["tensor"]),
    ],
)
def test_functional_collectives_accept_the_arguments(name: str, arguments: list[str]) -> None:
    schema = getattr(torch.ops._c10d_functional, name).default._schema
    assert [argument.name for argument in schema.arguments] == arguments


def test_a_group_is_found_by_its_name() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        group = dist.group.WORLD
        assert group is not None
        assert _torch.resolve_group(group.group_name) is group
    finally:
        dist.destroy_process_group()


def test_a_group_has_no_ranks_before_torch_has_entered_it_in_its_list() -> None:
    class Group(dist.ProcessGroup):
        pass

    with pytest.raises(KeyError):
        dist.get_process_group_ranks(Group(0, 1))  # type: ignore[call-arg]


def test_a_world_is_joined_from_the_environment_through_a_handler_in_a_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rendezvous = importlib.import_module(
        "torch.distributed.rendezvous"
    )  # its package has a function of that name
    monkeypatch.setattr(rendezvous, "_rendezvous_handlers", dict(rendezvous._rendezvous_handlers))
    monkeypatch.setattr(own_rendezvous, "_handlers", rendezvous._rendezvous_handlers)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    store = dist.HashStore()  # type: ignore[attr-defined]
    _torch.join_through(lambda: store)
    assert next(iter(rendezvous.rendezvous("env://"))) == (store, 3, 4)
    assert next(iter(rendezvous.rendezvous("env://", rank=1, world_size=2))) == (store, 1, 2)


def test_torch_asks_a_group_for_its_backend_and_devices_by_these_names() -> None:
    group = dist.ProcessGroup
    assert callable(group._get_backend)
    assert isinstance(group._device_types, property)
    assert "_get_backend(device)" in inspect.getsource(dist.batch_isend_irecv)


def test_work_in_plain_mode_is_seen_by_no_mode_and_not_changed_by_one() -> None:
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Watch(), torch.device("meta"):
        assert _torch.in_plain_mode(lambda: torch.empty(1).device.type) == "cpu"
        assert _torch.in_plain_mode(lambda: (x + x).requires_grad) is False
        assert seen == []
        assert torch.empty(1).device.type == "meta"
    assert seen
    assert (x + x).requires_grad


def test_the_opaque_op_has_an_ordered_effect() -> None:
    effects: Any = importlib.import_module("torch._higher_order_ops.effects")
    effect_of = effects._get_effect if torch.__version__ >= "2.10" else effects.SIDE_EFFECTS.get
    assert effect_of(torch.ops.gradmesh.collective.default) is not None


def test_inductor_has_the_hook_for_the_order_of_the_opaque_op() -> None:
    from torch._inductor import ir, lowering
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    assert callable(lowering.register_lowering)
    assert callable(ir.FallbackKernel.create)
    assert isinstance(ir.TensorBox, type)
    assert hasattr(V, "graph")
    source = inspect.getsource(GraphLowering.__init__)
    assert "self.effectful_ops" in source
    assert "self.operations" in source


def test_every_op_lists_its_keyword_only_fields_last() -> None:
    for row in REGISTRY:
        for op, _ in row.examples(gm.Axis("any", 0, 2, None)):  # type: ignore[arg-type]
            keyword_only = [bool(field.kw_only) for field in dataclasses.fields(op)]
            assert keyword_only == sorted(keyword_only)


def test_dynamo_calls_a_marked_function_while_it_compiles() -> None:
    calls: list[int] = []

    @_torch.constant_to_compilers
    def marked() -> int:
        calls.append(1)
        return len(calls)

    compiled = torch.compile(lambda x: x + marked(), fullgraph=True, backend="eager")
    assert [compiled(torch.zeros(1)).item() for _ in range(3)] == [1, 1, 1]
    assert calls == [1]


def test_dynamo_graphs_a_function_registered_while_compiling() -> None:
    graphs: list[Any] = []

    def entered(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    tell = _torch.enters_graphs(entered)

    def program(x: torch.Tensor) -> torch.Tensor:
        tell()
        return entered(x)

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compile(program, fullgraph=True, backend=look)(torch.ones(1))
    assert graphs == [entered]


@pytest.mark.filterwarnings("ignore")  # Dynamo warns about the graph break
@pytest.mark.parametrize("marked", [False, True])
def test_dynamo_compiles_neither_the_methods_of_a_marked_class_nor_the_code_that_they_call(
    marked: bool,
) -> None:
    compiled: list[Any] = []

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.extend(node.target for node in graph.graph.nodes if node.op == "call_method")
        return graph.forward

    def called(grad: torch.Tensor) -> torch.Tensor:
        return grad.exp()

    class Hook:
        def method(self, grad: torch.Tensor) -> torch.Tensor:
            return called(grad.sin())

    torch._dynamo.reset()  # would remove the mark from code that was compiled before
    if marked:
        _torch.never_compiled(Hook)
    x = torch.zeros(2, requires_grad=True)
    x.register_hook(Hook().method)  # autograd calls it from C++, inside of the compiled function

    def program() -> None:
        y = x.cos().sum() + x.sum()
        y.backward()

    torch.compile(program, backend=look)()
    assert "cos" in compiled
    assert ("sin" in compiled, "exp" in compiled) == (not marked, not marked)
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([math.exp(math.sin(1))] * 2)


@pytest.mark.filterwarnings("ignore")  # torch's tracers warn of themselves
def test_modes_that_record_ops_are_seen_and_observers_are_not() -> None:
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.tracing())
        return x.sin()

    x = torch.ones(2)
    make_fx(look)(x)
    torch.jit.trace(look, x, check_trace=False)
    assert seen == [True, True]
    torch.func.linearize(look, x)
    assert True in seen[2:]
    seen.clear()
    with FakeTensorMode():
        look(torch.ones(2))
    torch.func.vmap(look)(x)
    with FlopCounterMode(display=False):
        look(x)
    assert seen == [False] * 3


def test_fresh_memory_is_filled_with_nan_while_that_is_asked_for() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    assert _torch.fill_fresh_memory(True) is False
    try:
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.empty(1000).isnan().all()
        assert torch.ones(1).new_empty(1000).isnan().all()
    finally:
        assert _torch.fill_fresh_memory(False) is True
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_fused_attention_of_a_cpu_gives_the_logsumexp_and_takes_that_of_more_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, 9, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT * 0.3
    whole = scores.softmax(-1) @ leaves[2]
    gradients = torch.autograd.grad(whole, leaves, grad)
    lse = scores.detach().logsumexp(-1)
    kernel = _torch.fused_attention(q, k, v, False)
    assert kernel is not None
    out, found = kernel.forward(q, k, v, False, 0.3)
    assert torch.allclose(out, whole, atol=1e-14)
    assert torch.allclose(found, lse, atol=1e-14)
    parts = [
        kernel.backward(grad, q, k[:, :, part], v[:, :, part], whole.detach(), lse, diagonal=False, scale=0.3)
        for part in (slice(0, 5), slice(5, 9))
    ]
    joined = parts[0][0] + parts[1][0], *(torch.cat([part[n] for part in parts], 2) for n in (1, 2))
    assert all(torch.allclose(a, b, atol=1e-13) for a, b in zip(joined, gradients, strict=True))
    below, _ = kernel.forward(q, k, v, True, 0.3)
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    assert torch.allclose(below, scores.masked_fill(~seen, -torch.inf).softmax(-1) @ leaves[2], atol=1e-14)
    assert _torch.fused_attention(q, k[:, :, :0], v[:, :, :0], False) is None  # it would end the process
    assert _torch.fused_attention(q, k, v[..., :2], False) is None


def _fsdp_tells() -> dict[str, Any]:
    """What `gm.objective(ddp=)` asks of torch's wrappers, on the one rank of a group."""
    found: dict[str, Any] = {}
    linear = torch.nn.Linear(2, 1, bias=False)
    old = importlib.import_module("torch.distributed._composable.replicate").replicate(linear)
    found["in the registry"] = fsdp.is_replicated(old)
    found["not in the registry"] = fsdp.is_replicated(torch.nn.Linear(2, 1))

    sharded = torch.nn.Linear(2, 1, bias=False)
    wrapper: Any = fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    parameters = fsdp.fully_sharded(sharded)
    found["sharded"] = parameters is not None and [divisor for divisor, _ in parameters.values()]
    found["its own"] = parameters is not None and list(parameters) == [id(sharded.weight)]
    wrapper.set_gradient_divide_factor(3.0)
    parameters = fsdp.fully_sharded(sharded)
    found["set"] = parameters is not None and [divisor for divisor, _ in parameters.values()]
    gathered: list[Any] = []
    sharded.register_forward_hook(lambda *_: gathered.append(sharded.weight))
    sharded(torch.ones(1, 2))
    parameters = fsdp.fully_sharded(sharded)
    found["gathered"] = parameters is not None and parameters.keys() == {id(gathered[0]), id(sharded.weight)}
    found["over"] = parameters is not None and all(mesh.size() == 1 for _, mesh in parameters.values())

    kept = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
    wrapped = FullyShardedDataParallel(
        kept, ignored_modules=[kept[0]], use_orig_params=True, device_id=torch.device("cpu")
    )
    found["ignored"] = fsdp.ignored_by_fsdp(wrapped) == {id(kept[0].weight)}
    for kind in (True, False):
        both = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1, bias=False))
        whole: Any = FullyShardedDataParallel(both, use_orig_params=kind, device_id=torch.device("cpu"))
        whole(torch.ones(1, 2)).sum().backward()
        rows = list(fsdp.flattened(whole))
        where = [(owner, name, part) for _, _, owner, name, part in rows]
        parts = [None] * 3 if kind else [slice(0, 4), slice(4, 6), slice(6, 8)]
        names = [(both[0], "weight"), (both[0], "bias"), (both[1], "weight")]
        found[f"flattened, {kind}"] = where == [(*n, part) for n, part in zip(names, parts, strict=True)]
        found[f"its gradients, {kind}"] = [
            (held.grad if part is None else held.grad[part]).numel()  # type: ignore[union-attr,index]
            for held, _, _, _, part in rows
        ]
        found[f"held, {kind}"] = [fsdp.is_flattened(each) for each in whole.parameters()]
    found["not held"] = any(map(fsdp.is_flattened, kept[0].parameters()))
    y: Any = wrapped(torch.ones(1, 2))
    leaves, nodes = set(), [y.grad_fn]
    while nodes:
        nodes += [after for after, _ in nodes.pop().next_functions if after is not None]
        leaves |= {id(node.variable) for node in nodes if hasattr(node, "variable")}
    found["flat"] = {id(flat) for flat in fsdp.flat_parameters(wrapped)} <= leaves != set()
    return found


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
def test_averaging_wrappers_report_parameters_and_divisors(
    processes: Callable[[int], Callable[..., list[Any]]],
) -> None:
    assert processes(1)(_fsdp_tells) == [
        {
            "in the registry": True,
            "not in the registry": False,
            "sharded": [1.0],
            "its own": True,
            "set": [3.0],
            "gathered": True,
            "over": True,
            "flat": True,
            "ignored": True,
            "flattened, True": True,
            "its gradients, True": [4, 2, 2],
            "held, True": [True] * 3,
            "flattened, False": True,
            "its gradients, False": [4, 2, 2],
            "held, False": [True],
            "not held": False,
        }
    ]


def _twin_of_two() -> tuple[int, str, float] | None:
    group = dist.new_group([1, 3], timeout=timedelta(seconds=45))
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    made = _torch.duplicate_group(group, "async")
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x, group=made)
    assert dist.get_process_group_ranks(made) == [1, 3]
    assert dist.get_group_rank(made, 3) == 1
    limit = getattr(made, "timeout", None) or made._get_backend(torch.device("cpu")).options._timeout
    seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
    return int(x.item()), dist.get_backend(made), seconds


@pytest.mark.processes
def test_the_members_of_a_group_alone_make_another_one_of_its_backend_and_timeout(
    processes: Callable[[int], Callable[..., list[Any]]],
) -> None:
    first, *found = processes(4)(_twin_of_two)
    assert first is found[1] is None
    assert found[0] == found[2]
    assert (found[0][0], found[0][2]) == (4, 45.0)
    assert found[0][1] in ("cpu:gloo", "cpu:shm")


def test_checkpoint_region_is_identified_by_its_hooks() -> None:
    seen: list[object] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.checkpoint_region())
        return x.sin().exp()

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        assert _torch.checkpoint_region() is None
    checkpoint(region, x, use_reentrant=False).sum().backward()
    checkpoint(region, x, use_reentrant=True).sum().backward()
    assert _torch.checkpoint_region() is None
    first, again, *reentrant = seen
    assert first is not None
    assert again is not None
    assert first is not again
    assert reentrant == [None, None]


class Asks(torch.autograd.Function):
    """A node that asks what becomes of its operand's gradient, and hands none on."""

    found: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        leaf, accumulate = _torch.leaf_behind(ctx)
        Asks.found.append((leaf, None if leaf is None else _torch.accumulates(accumulate)))
        return None, grad


def test_node_receives_its_leaf_and_gradient_use() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    Asks.found.clear()
    Asks.apply(x, y).sum().backward()
    Asks.apply(x, y).sum().backward(inputs=[x, y])
    Asks.apply(x, y).sum().backward(inputs=[y])
    torch.autograd.grad(Asks.apply(x, y).sum(), [x, y], allow_unused=True)
    torch.autograd.grad(Asks.apply(x, y).sum(), y)
    Asks.apply(x.detach(), y).sum().backward()
    Asks.apply(x * 1, y).sum().backward()
    assert [leaf is x for leaf, _ in Asks.found] == [True] * 5 + [False] * 2
    assert [flag for _, flag in Asks.found] == [True, True, False, False, False, None, None]


def test_work_after_a_pass_may_go_backward_itself_and_is_left_out_if_the_pass_fails() -> None:
    x, seen = torch.ones(2, requires_grad=True), list[int]()

    def work() -> None:
        seen.append(_torch.backward_pass())
        torch.autograd.backward([x], [torch.full((2,), 3.0)])

    def failing(grad: torch.Tensor) -> None:
        raise ValueError("on the way")

    y = x * 2
    y.register_hook(lambda _: _torch.after_pass(work))
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 5.0]
    z = x * 2
    z.register_hook(failing)
    w = z * 2
    w.register_hook(lambda _: _torch.after_pass(work))
    with pytest.raises(ValueError, match="on the way"):
        w.sum().backward()
    x.sum().backward()
    assert len(seen) == 1


def test_hooks_of_a_leaf_are_seen() -> None:
    x = torch.nn.Parameter(torch.ones(2))
    assert _torch.can_accumulate_later(x)
    assert not _torch.can_accumulate_later(torch.ones(2, requires_grad=True))
    assert not _torch.can_accumulate_later(x * 2)
    assert not _torch.can_accumulate_later(x.detach())
    for register in (x.register_hook, x.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        assert not _torch.can_accumulate_later(x)
        handle.remove()
    assert _torch.can_accumulate_later(x)


def test_dispatch_mode_sees_operators_with_arguments_and_writes() -> None:
    seen: list[tuple[tuple[str, str], tuple[tuple[str, bool], ...]]] = []

    class Mode(_torch.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((_torch.dispatched_name(func), _torch.arguments_of(func)))
            return func(*args, **(kwargs or {}))

    _torch.need_dispatch()
    with Mode():
        torch.ones(2).add_(1)
    assert [name for name, _ in seen] == [("aten", "ones"), ("aten", "add_")]
    assert seen[1][1] == (("self", True), ("other", False), ("alpha", False))


def test_a_write_is_counted_in_the_version_of_every_view_when_the_mode_is_through() -> None:
    versions: list[int] = []

    class Mode(_torch.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            versions.append(_torch.version_of(args[0]))
            return result

    x = torch.ones(2, 2)
    view, before = x[0], _torch.version_of(x)
    with Mode():
        x.mul_(2)
    assert versions == [before]
    assert _torch.version_of(x) == _torch.version_of(view) == before + 1
    with torch.inference_mode():
        assert _torch.version_of(torch.ones(1)) == -1


@pytest.mark.processes
def test_operators_of_c10d_are_handed_their_group() -> None:
    assert gm.launch(_groups_seen, 1, backend="gloo") == [True]


def _groups_seen() -> bool:
    found: list[bool] = []

    class Mode(_torch.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            boxed = [one for one in args if isinstance(one, torch.ScriptObject)]
            found.append(any(_torch.group_behind(one) is dist.group.WORLD for one in boxed))
            return func(*args, **(kwargs or {}))

    with Mode():
        dist.all_reduce(torch.ones(1))
    return all(found[-1:])


@pytest.mark.processes
@pytest.mark.parametrize("version", [torch.__version__, "2.9.1"])
def test_the_reduction_of_an_operator_of_c10d_is_known(version: str) -> None:
    """Torch before 2.10 does not tell it, and what is done there is right on any."""
    assert gm.launch(_reductions_seen, 1, args=(version,), backend="gloo") == [
        ["sum", "product", "min", "max"]
    ]


def _reductions_seen(version: str) -> list[str]:
    found: list[str] = []

    class Mode(_torch.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d":
                found.append(
                    operators.reduction_of(operators.arguments(func, args, kwargs or {})["reduce_op"])
                )
            return func(*args, **(kwargs or {}))

    with pytest.MonkeyPatch.context() as patched, Mode():
        patched.setattr(torch, "__version__", TorchVersion(version))
        for reduce in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            dist.all_reduce(torch.ones(1), op=reduce)
    return found


def test_a_profiler_can_be_asked_for_all_threads() -> None:
    profiler = _torch.profiler_of_all_threads()
    profiler.start()
    other = threading.Thread(target=lambda: torch.ones(3).erfinv())
    other.start()
    other.join()
    profiler.stop()
    assert "aten::erfinv" in {event.name for event in profiler.events() or ()}


def test_the_context_of_a_compilation_is_that_of_its_thread() -> None:
    seen: list[bool] = []
    context: Any = torch._guards.CompileContext

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        other = threading.Thread(target=lambda: seen.append(context.try_get() is None))
        other.start()
        other.join()
        seen.append(context.try_get() is not None)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(torch.sin, backend=backend)(torch.ones(2))
    assert seen == [True, True]
    assert context.try_get() is None


# ---- no private name of torch is used outside of _torch

PACKAGE = Path(gm.__file__).parent


@functools.cache  # by the tests, not while they are collected
def trees() -> dict[Path, ast.Module]:
    """The modules of the package, by file."""
    return {file: ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}


def is_private(name: str) -> bool:
    return name.startswith("_") and name != "_" and not (name.startswith("__") and name.endswith("__"))


def own_names(trees: list[ast.Module]) -> set[str]:
    """The private names that modules define."""
    found: set[str] = set()
    for node in [node for tree in trees for node in ast.walk(tree)]:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                found |= {each.value for each in ast.walk(value) if isinstance(each, ast.Constant)}
    return set(filter(is_private, found))


@functools.cache
def own_names_of_the_package() -> set[str]:
    return own_names(list(trees().values()))


OF_TORCH = {
    name
    for kind in (
        torch.nn.Module(),
        torch.Tensor,
        dist.ProcessGroup,
        torch.autograd.Function,
        torch.optim.Optimizer,
    )
    for name in dir(kind)
    if is_private(name)
}
NOT_TORCH = {"os", "subprocess", "sys"}
NAMED_TUPLES = {"_asdict", "_fields", "_replace"}


def private_torch_names(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and text of what looks like a private name of torch in a module.

    These are imports; attributes that no module of the package defines, or that torch's classes have and this module
    does not define; the same in `getattr` and its like; and dotted names in texts. Names of operators are texts without
    a dot: a trace has them, and an unknown one matches nothing.
    """
    own, found = own_names([tree]), []

    def foreign(name: str) -> bool:
        return (
            is_private(name)
            and name not in NAMED_TUPLES | own
            and (name not in own_names_of_the_package() or name in OF_TORCH)
        )

    for node in ast.walk(tree):
        paths: list[str] = []
        match node:
            case ast.Import(names=names):
                paths = [each.name for each in names]
            case ast.ImportFrom(module=str(module), names=names):
                paths = [f"{module}.{each.name}" for each in names]
            case ast.Attribute(attr=name, value=value) if foreign(name):
                if not (isinstance(value, ast.Name) and value.id in NOT_TORCH):
                    found.append((node.lineno, ast.unparse(node)))
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ) if foreign(name):
                found.append((node.lineno, ast.unparse(node)))
            case ast.Constant(value=str(text)) if " " not in text:
                paths = [text]
        for path in paths:
            first, *parts = path.split(".")
            if first == "torch" and any(map(is_private, parts)):
                found.append((node.lineno, path))  # type: ignore[attr-defined]
    return sorted(found)


def test_private_names_of_torch_are_used_in_one_package() -> None:
    outside = {file: tree for file, tree in trees().items() if file.parent.name != "_torch"}
    found = {str(file.relative_to(PACKAGE)): private_torch_names(tree) for file, tree in outside.items()}
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "planted",
    [
        "import torch._dynamo",
        "from torch._C import _len_torch_dispatch_stack",
        "from torch.distributed.distributed_c10d import _world",
        "def f(x): return x._base",
        "def f(self): return self._modules",
        "def f(x): return getattr(x, '_local_tensor', x)",
        "torch._C._get_tracing_state()",
        "import sys; sys.modules.get('torch._dynamo')",
        "node.grad_fn._sequence_nr()",
    ],
)
def test_planted_private_name_is_found(planted: str) -> None:
    assert private_torch_names(ast.parse(planted))


def test_own_private_names_are_not_taken_for_those_of_torch() -> None:
    plain = "class A:\n def __init__(self): self._base = 1\n def f(self): return self._base, sys._getframe()"
    assert private_torch_names(ast.parse(plain)) == []


def test_every_private_name_is_registered() -> None:
    """In `_torch` itself, every attribute that torch's objects have is the last part of a registered path."""
    registered = {part for path in (*_torch.RELIED_ON, *names.RELIED_ON_LATER) for part in path.split(".")}
    found = {
        (file.name, line, text)
        for file, tree in trees().items()
        if file.parent.name == "_torch"
        for line, text in private_torch_names(tree)
        if registered.isdisjoint(re.findall(r"\w+", text))
    }
    assert found == set()
