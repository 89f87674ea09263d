"""gradmesh in a torch that lacks a private name: what it warns of, what still works, what it refuses.

Run as `python -m tests.lacking NAME... --import NAME...`; writes one JSON object per name. Each name has a process of
its own, a fork of one that has imported torch but not gradmesh. Those after `--import` have no feature tried.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # what torch imports late would miss the name, too
import torch.distributed as dist
import torch.distributed.device_mesh
import torch.library
from torch._functorch import eager_transforms, predispatch  # noqa: F401
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

REFUSED = "is not supported by torch"

EFFECT = (
    ("torch._library.effects.EffectType.ORDERED", "torch.library.CustomOpDef.register_effect")
    if torch.__version__ >= "2.10"
    else tuple(
        f"torch._higher_order_ops.effects.{name}"
        for name in ("_EffectType.ORDERED", "_register_effectful_op")
    )
)
"""What keeps the collectives of a compiled program in order."""

# The names that are asked for while a program is compiled. Compiling takes long, and is tried without these only.
SEEN_BY_COMPILERS = {
    "torch.ops._c10d_functional.all_gather_into_tensor",
    "torch.ops._c10d_functional.all_reduce",
    "torch.ops._c10d_functional.all_to_all_single",
    "torch.ops._c10d_functional.broadcast",
    "torch.ops._c10d_functional.reduce_scatter_tensor",
    "torch.ops._c10d_functional.wait_tensor",
    "torch._subclasses.FakeTensor",
    "torch.distributed.distributed_c10d._resolve_process_group",
    *EFFECT,
    "torch._C._are_functorch_transforms_active",
    "torch.autograd.forward_ad._current_level",
}


def remove(path: str) -> Callable[[], None]:
    """Take a name out of torch.

    Returns:
        A function that puts it back.
    """
    if " asking for " in path:
        function, name = path.split(" asking for ")
        plain: Any = pkgutil.resolve_name(function)
        before = plain.__code__
        plain.__code__ = before.replace(co_names=tuple(n.replace(name, f"{name}_") for n in before.co_names))
        return lambda: setattr(plain, "__code__", before)
    for op in SEEN_BY_COMPILERS:
        pkgutil.resolve_name(op)  # a namespace of ops lists only those that were asked for
    parent_path, _, name = path.rpartition(".")
    parent = pkgutil.resolve_name(parent_path)
    value = getattr(parent, name)
    with contextlib.suppress(AttributeError, TypeError):
        delattr(parent, name)
    if not hasattr(parent, name):
        return lambda: setattr(parent, name, value)
    # A namespace that makes its names when they are asked for, or one that cannot be written: another one stands in.
    grandparent, _, parent_name = parent_path.rpartition(".")
    others = {other: getattr(parent, other) for other in dir(parent) if other != name}
    setattr(pkgutil.resolve_name(grandparent), parent_name, types.SimpleNamespace(**others))
    return lambda: setattr(pkgutil.resolve_name(grandparent), parent_name, parent)


# ---- The features, each on two ranks that are threads or on one rank ---------------------------------------------


def _backward(gm: Any) -> bool:
    def on_rank() -> list[float]:
        x = torch.tensor([1.0 + gm.axis().rank], requires_grad=True)
        ((1 + gm.axis().rank) * (gm.all_gather(x) ** 2).sum()).backward()
        grad: list[float] = x.grad.tolist()  # type: ignore[union-attr]
        return grad

    return bool(gm.launch(on_rank, 2, backend="threads", timeout=60) == [[6.0], [12.0]])


def _forward_on_threads(gm: Any) -> bool:
    def on_rank() -> list[float]:
        x = torch.tensor([1.0 + gm.axis().rank])
        got: list[float] = torch.func.jvp(lambda x: gm.all_gather(x) ** 2, (x,), (torch.ones(1),))[1].tolist()
        return got

    return bool(gm.launch(on_rank, 2, backend="threads", timeout=60) == [[2.0, 4.0]] * 2)


def _modes(gm: Any) -> bool:
    gm.init()
    x = torch.arange(3.0)
    right = torch.equal(torch.func.grad(lambda x: (gm.all_gather(x) ** 2).sum())(x), 2 * x)
    right &= torch.equal(torch.func.vmap(gm.all_gather)(torch.ones(2, 3)), torch.ones(2, 3))
    right &= torch.equal(torch.func.jvp(lambda x: gm.all_gather(x) ** 2, (x,), (torch.ones(3),))[1], 2 * x)
    right &= torch.equal(torch.func.hessian(lambda x: (gm.all_gather(x) ** 3).sum())(x), torch.diag(6 * x))
    with forward_ad.dual_level():
        dual = gm.all_gather(forward_ad.make_dual(x, 2 * x))
        right &= torch.equal(forward_ad.unpack_dual(dual).tangent, 2 * x)
    return right


def _batched(gm: Any) -> bool:
    gm.init()
    x = torch.ones(3, requires_grad=True)
    (rows,) = torch.autograd.grad(2 * gm.all_gather(x), x, torch.eye(3)[:2], is_grads_batched=True)
    return torch.equal(rows, 2 * torch.eye(3)[:2])


def _ordered(gm: Any) -> bool:
    def on_rank() -> tuple[list[float], str]:
        scale = 1.0 + gm.axis().rank
        x = torch.tensor([scale], requires_grad=True)
        with gm.ordered():
            y = checkpoint(lambda x: gm.all_gather(x.sin()), x, use_reentrant=False)
            gm.backward(scale * y.sum())
        assert x.grad is not None
        grad: list[float] = (x.grad / x.detach().cos()).tolist()
        try:
            with gm.ordered():
                gm.backward(checkpoint(lambda x: gm.all_gather(x.sin()), x, use_reentrant=True).sum())
        except gm.OrderError:
            return grad, "refused"
        return grad, "taken"

    got = gm.launch(on_rank, 2, backend="threads", timeout=60)
    return all(abs(grad[0] - 3) < 1e-6 and said == "refused" for grad, said in got)


def _no_sync(gm: Any) -> bool:
    """Two micro-batches of a parameter that every rank has."""

    def body() -> list[float]:
        w = torch.nn.Parameter(torch.ones(2))
        with gm.no_sync():
            (gm.replicate(w).sum() * (1 + gm.rank())).backward()
        gm.replicate(w).sum().backward()
        assert w.grad is not None
        return w.grad.tolist()

    return bool(gm.launch(body, 2, backend="threads") == [[5.0, 5.0]] * 2)


def _async(gm: Any) -> bool:
    """A gather that is waited for later, in a checkpointed region and outside of one."""

    def body() -> list[float]:
        x = torch.tensor([1.0 + gm.rank()], requires_grad=True)

        def gathered(x: torch.Tensor) -> torch.Tensor:
            coming = gm.all_gather(x, async_op=True)
            y: torch.Tensor = coming.wait()
            return y.exp().log() * (1 + gm.rank())

        (gathered(x) + checkpoint(gathered, x, use_reentrant=False)).sum().backward()
        assert x.grad is not None
        return x.grad.round(decimals=4).tolist()

    return bool(gm.launch(body, 2, backend="threads", timeout=60) == [[6.0], [6.0]])


def _ordered_vmap(gm: Any) -> bool:
    gm.init()
    x = torch.ones(2, 3, requires_grad=True)
    with gm.ordered():
        gm.backward(torch.func.vmap(gm.all_gather)(x).sum())
    return x.grad is not None and torch.equal(x.grad, torch.ones(2, 3))


def _profile(gm: Any) -> bool:
    gm.init()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        gm.all_gather(torch.ones(1))
    return any("gradmesh::all_gather" in event.name for event in profiled.events() or ())


def _meta(gm: Any) -> bool:
    gm.init()
    with FakeTensorMode():
        right = tuple(gm.all_gather(torch.empty(3)).shape) == (3,)
    return right and gm.all_gather(torch.empty(3, device="meta")).is_meta


def _plain_kernels(gm: Any) -> bool:
    def on_rank() -> list[float]:
        x, out = torch.tensor([1.0 + dist.get_rank()], requires_grad=True), torch.empty(2)
        dist.all_gather_into_tensor(out, x)
        assert not out.requires_grad
        return out.tolist()

    return bool(gm.launch(on_rank, 2, backend="threads", timeout=60) == [[1.0, 2.0]] * 2)


def _reorderable(gm: Any, verb: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    with gm.reorderable():
        return _compiled(gm, verb)


def _compiled(gm: Any, verb: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.compiler.reset()  # each verb is another program of the same code, and these are counted
    compiled = torch.compile(lambda x: verb(x).sum(), fullgraph=True, backend="eager")
    with gm.check(0):  # no other rank says anything
        return bool(compiled(torch.ones(2)).ndim == 0)


def _attention(gm: Any) -> bool:
    """Attention in parts, whose gradients are those of the whole."""

    def on_each_rank() -> bool:
        x = torch.arange(12.0, dtype=torch.float64).view(1, 1, 6, 2) / 12
        part = gm.nn.sequence.shard(x).requires_grad_()
        gm.nn.ring_attention(part, part, part, causal=True).square().sum().backward()
        whole = x.clone().requires_grad_()
        torch.nn.functional.scaled_dot_product_attention(
            whole, whole, whole, is_causal=True
        ).square().sum().backward()
        return torch.allclose(part.grad, gm.nn.sequence.shard(whole.grad))

    return all(gm.launch(on_each_rank, 2, backend="threads"))


def _by_hand(gm: Any) -> bool:
    """A Function whose backward calls the adjoint by hand, and every rank uses both of its results."""

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = gm.all_gather(x)
            return result

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = gm.reduce_scatter(grad)
            return result

    def on_rank() -> list[float]:
        x = torch.tensor([1.0 + gm.rank()], requires_grad=True)
        (Gathered.apply(x) * Gathered.apply(2 * x) * (1 + gm.rank())).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    return bool(gm.launch(on_rank, 2, backend="threads", timeout=60) == [[12.0], [24.0]])


FEATURES: dict[str, Callable[[Any], bool]] = {
    "threads": _backward,
    "forward mode on threads": _forward_on_threads,
    "transforms and levels": _modes,
    "batched gradients": _batched,
    "ordered": _ordered,
    "vmap in ordered": _ordered_vmap,
    "async calls": _async,
    "by hand": _by_hand,
    "attention": _attention,
    "no_sync": _no_sync,
    "profile": _profile,
    "tensors without values": _meta,
    "raw collectives": _plain_kernels,
    "reorderable all_gather": lambda gm: _reorderable(gm, gm.all_gather),
    "reorderable all_reduce": lambda gm: _reorderable(gm, lambda x: gm.all_reduce(x, dst=gm.R)),
    "reorderable broadcast": lambda gm: _reorderable(gm, gm.broadcast),
    "compiled reduce": lambda gm: _compiled(gm, gm.reduce),
    "reorderable reduce_scatter": lambda gm: _reorderable(gm, gm.reduce_scatter),
    "reorderable all_to_all": lambda gm: _reorderable(gm, gm.all_to_all),
    "compiled all_gather": lambda gm: _compiled(gm, gm.all_gather),
    "compiled ragged all_gather": lambda gm: _compiled(gm, lambda x: gm.all_gather(x, sizes=[2, 3])),
    "compiled shift": lambda gm: _compiled(gm, gm.shift),
}


def outcome(feature: Callable[[Any], bool], gm: Any) -> str:
    """`right`, `wrong`, `refused`, or the error that was not gradmesh's own."""
    try:
        return "right" if feature(gm) else "wrong"
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        own = isinstance(error, gm.GradmeshError) and not isinstance(error, gm.RankError)
        return "refused" if own or REFUSED in text else text
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def report(path: str, features: dict[str, Callable[[Any], bool]]) -> dict[str, Any]:
    """What gradmesh says at import without that name, and what became of these features."""
    put_back = remove(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import gradmesh as gm
    put_back()  # torch itself uses most of these names while it runs
    warnings.simplefilter("ignore")
    return {
        "name": path,
        "warnings": [(each.category.__name__, str(each.message)) for each in caught],
        "features": {
            name: outcome(feature, gm)
            for name, feature in features.items()
            if path in SEEN_BY_COMPILERS or not name.startswith(("compiled", "reorderable"))
        },
    }


def main(paths: list[str]) -> None:
    """Print a report of each name."""
    torch.set_num_threads(1)
    at_work, features = 0, FEATURES
    for path in paths:
        if path == "--import":
            features = {}
            continue
        sys.stdout.flush()
        if at_work == (os.cpu_count() or 1):
            os.wait()
            at_work -= 1
        if os.fork() == 0:
            os.write(
                1, f"{json.dumps(report(path, features))}\n".encode()
            )  # whole, beside what the others write
            os._exit(0)
        at_work += 1
    for _ in range(at_work):
        os.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
