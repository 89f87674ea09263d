"""Plays a script on local processes as torchrun would, and differentiates its loss by differences.

The ranks are forked from a server that has torch loaded, so a script takes as long as it works. `play` runs it once
and keeps what each optimizer step saw. `derivatives` runs it up to the first step, once as it is and twice for each
parameter, moved along a random direction and against it: how the sum of the ranks' losses changes does not depend on
any backward pass, so it is the truth that gradients are held against.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import io
import itertools
import multiprocessing
import os
import runpy
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradmesh._torch import functorch_active
from gradmesh.launch.process_ranks import held_port
from tests.scripts import Script

__all__ = ["Derivative", "Played", "derivatives", "play"]

STEP = 1e-6
Sums = Literal["as they come", "at once", "late"]
TORCH_SEED = 67280421310721  # what torch starts with in a new process


class _Enough(BaseException):
    """The first optimizer step is reached."""


@dataclasses.dataclass
class Seen:
    """What one rank's run showed: losses that were differentiated, parameters at each step and call."""

    losses: list[float] = dataclasses.field(default_factory=list)
    gradients: list[list[Tensor | None]] = dataclasses.field(default_factory=list)
    before: list[list[Tensor]] = dataclasses.field(default_factory=list)
    after: list[list[Tensor]] = dataclasses.field(default_factory=list)
    buffers: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    first_input: Tensor | None = None
    weights: list[list[Tensor]] = dataclasses.field(default_factory=list)
    masks: list[Tensor] = dataclasses.field(default_factory=list)
    dots: dict[str, tuple[bool, float]] = dataclasses.field(default_factory=dict)
    error: str = ""
    printed: str = ""


@dataclasses.dataclass(frozen=True)
class Played:
    """The ranks' runs of a script; `hung` if they had to be ended."""

    ranks: tuple[Seen, ...]
    seconds: float
    hung: bool


@dataclasses.dataclass(frozen=True)
class Derivative:
    """What a parameter's gradient says of a direction on each rank, as a multiple of what the losses really do."""

    name: str
    factors: tuple[float, ...]
    true: float


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def own(p: Tensor) -> Tensor:
    return (p.to_local() if isinstance(p, DTensor) else p).detach().clone()


def names() -> dict[int, str]:
    """The names of all parameters of all modules that are alive, the longest path of each."""
    found: dict[int, str] = {}
    for module in [m for m in gc.get_objects() if isinstance(m, nn.Module)]:
        for name, p in module.named_parameters():
            found[id(p)] = max(found.get(id(p), ""), name.removeprefix("module."), key=len)
    return found


class LateSum:
    """An asynchronous sum that reads its operand as it starts, and writes it in `wait()`."""

    def __init__(self, x: Tensor, total: Tensor) -> None:
        self.x, self.total = x, total

    def wait(self, timeout: Any = None) -> bool:
        """Write the sum."""
        self.x.detach().copy_(self.total)
        return True


class Watch:
    """Sees what a script differentiates and steps with; moves one parameter before it starts, if told to."""

    def __init__(
        self,
        script: Script,
        first: bool = False,
        move: tuple[int, float] | None = None,
        cut: bool = False,
        sums: Sums = "as they come",
    ) -> None:
        self.script, self.first, self.move, self.cut, self.sums = script, first, move, cut, sums
        self.seen = Seen()
        self.params: list[Tensor] = []
        self.root: nn.Module | None = None
        self.buffers: dict[str, Tensor] = {}

    def direction(self, index: int, p: Tensor, cut: bool) -> Tensor:
        """A random direction for a parameter; another one on each rank for what is cut."""
        generator = torch.Generator().manual_seed(1000 * (1 + dist.get_rank()) * cut + index)
        return torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)

    def added(self, optimizer: torch.optim.Optimizer) -> None:
        for p in [p for group in optimizer.param_groups for p in group["params"]]:
            index = len(self.params)
            self.params.append(p)
            if self.move is not None and self.move[0] == index:
                self.shift(index, p, self.move[1])

    def shift(self, index: int, p: Tensor, by: float) -> None:
        v = self.direction(index, p, self.cut)
        with torch.no_grad():
            p.add_(
                distribute_tensor(v, p.device_mesh, p.placements) if isinstance(p, DTensor) else v, alpha=by
            )

    def stepping(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if len(args) < 2:
            self.steps(optimizer)
            return None

        def closure() -> Any:
            loss = args[1]()
            self.steps(optimizer)
            return loss

        return (optimizer, closure), kwargs

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """See the gradients that it is about to use: those that a closure leaves, if it has one."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if self.first:
            named = names() if self.move is None else {}
            for index, p in enumerate(self.params):
                if self.move is None and p.grad is not None and any(p is q for q in params):
                    name = named.get(id(p), "?")
                    cut = name.endswith(self.script.cut) if self.script.cut else False
                    dot = float((whole(p.grad) * self.direction(index, p, cut)).sum())
                    self.seen.dots[f"{index} {name}"] = (cut, dot)
            raise _Enough
        self.seen.gradients.append([None if p.grad is None else whole(p.grad) for p in params])
        self.seen.before.append([own(p) for p in params])

    def stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.seen.after.append([own(p) for p in params])

    def called(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or functorch_active():
            return
        if self.root is None:
            self.root = module
        if module is self.root:
            self.seen.weights.append([own(p) for p in module.parameters()])
        if self.seen.first_input is None and args and isinstance(args[0], Tensor):
            self.seen.first_input = whole(args[0])

    def dropped(self, module: nn.Module, args: Any, out: Any) -> None:
        if not torch.compiler.is_compiling() and isinstance(module, nn.Dropout) and module.training:
            given, left = whole(args[0]), whole(out)
            self.seen.masks.append(torch.where(given == 0, -1, (left == 0).int()))

    def registered(self, module: nn.Module, name: str, buffer: Tensor | None) -> None:
        self.buffers[f"{len(self.buffers)} {name}"] = module  # type: ignore[assignment]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        backward, grad, start = torch.autograd.backward, torch.autograd.grad, torch.optim.Optimizer.__init__
        init, all_reduce = dist.init_process_group, dist.all_reduce

        def seen_all_reduce(tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            if self.sums == "as they come" or not async_op:
                return all_reduce(tensor, *args, async_op=async_op, **kwargs)
            total = tensor.detach().clone() if self.sums == "late" else tensor
            all_reduce(total, *args, **kwargs)
            return LateSum(tensor, total)

        def noted(root: Any) -> None:
            for x in root if isinstance(root, (tuple, list)) else (root,):
                if x.numel() == 1:
                    self.seen.losses.append(float(whole(x)))

        def seen_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if grad_tensors is None or (isinstance(grad_tensors, tuple) and grad_tensors[0] is None):
                noted(tensors)
            backward(tensors, grad_tensors, *args, **kwargs)

        def seen_grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("create_graph") and not kwargs.get("grad_outputs"):
                noted(outputs)
            return grad(outputs, *args, **kwargs)

        def seen_start(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            start(optimizer, *args, **kwargs)
            self.added(optimizer)

        def seen_init(*args: Any, **kwargs: Any) -> None:
            if not dist.is_initialized():
                init(*args, **kwargs)

        hooks = [
            register_optimizer_step_pre_hook(self.stepping),
            register_optimizer_step_post_hook(self.stepped),
            nn.modules.module.register_module_forward_pre_hook(self.called),
            nn.modules.module.register_module_forward_hook(self.dropped),
            nn.modules.module.register_module_buffer_registration_hook(self.registered),
        ]
        with (
            mock.patch("torch.autograd.backward", seen_backward),
            mock.patch("torch.autograd.grad", seen_grad),
            mock.patch("torch.optim.Optimizer.__init__", seen_start),
            mock.patch("torch.distributed.init_process_group", seen_init),
            mock.patch("torch.distributed.all_reduce", seen_all_reduce),
            mock.patch("torch.distributed.destroy_process_group"),
        ):
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()
                for key, module in self.buffers.items():
                    value = getattr(module, key.split(" ", 1)[1], None)
                    if isinstance(value, Tensor):
                        self.seen.buffers[key] = value.detach().clone()


def once(watch: Watch, rank: int, port: int) -> Seen:
    path = str(watch.script.path)
    size = str(watch.script.ranks)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": size,
        "RANK": str(rank),
    }
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": size}
    torch.manual_seed(TORCH_SEED)
    out = io.StringIO()
    try:
        with watch.watching(), contextlib.redirect_stdout(out), mock.patch.object(sys, "argv", [path]):
            runpy.run_path(path, run_name="__main__")
    except _Enough:
        pass
    except Exception:
        watch.seen.error = traceback.format_exc()
    finally:
        watch.seen.printed = out.getvalue()
    return watch.seen


def _played(script: Script, rank: int, port: int, sums: Sums) -> Seen:
    return once(Watch(script, sums=sums), rank, port)


def _derived(script: Script, rank: int, port: int) -> list[Seen]:
    torch.set_default_dtype(torch.float64)
    runs = [once(Watch(script, first=True), rank, port)]
    for name, (cut, _) in runs[0].dots.items():
        for by in (STEP, -STEP):
            runs.append(once(Watch(script, True, (int(name.split()[0]), by), cut), rank, port))
    return runs


def _rank(work: Callable[..., Any], script: Script, rank: int, port: int, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    sent = io.BytesIO()
    torch.save(work(script, rank, port), sent)
    pipe.send_bytes(sent.getvalue())
    # A script's frame often holds DDP longer than its group, which then goes with DDP: it waits for its thread with
    # the interpreter locked, and the thread for the interpreter. So groups are left to the system.
    os._exit(0)


def _on_ranks(work: Callable[..., Any], script: Script, limit: float) -> tuple[list[Any], float, bool]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["tests.scripts.running", "tests.scripts.warm", "torch.distributed.fsdp", "torch.nn.parallel"]
    )
    pipes, ranks = [], []
    start = time.perf_counter()
    with held_port() as port:
        for rank in range(script.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(work, script, rank, port, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            ranks.append(process)
        results: list[Any] = []
        hung = False
        for pipe in pipes:
            ready = pipe.poll(max(0.0, start + limit - time.perf_counter()))
            hung |= not ready
            try:
                sent = io.BytesIO(pipe.recv_bytes()) if ready else None
            except (EOFError, ConnectionResetError):
                sent = None
            results.append(sent and torch.load(sent, weights_only=False))
    seconds = time.perf_counter() - start
    for process in ranks:
        process.join(0 if hung else 10)
        process.kill()
    return results, seconds, hung


def play(script: Script, limit: float = 60.0, sums: Sums = "as they come") -> Played:
    """Run a script once on all its ranks; its asynchronous sums end when they do, at once, or in `wait()`."""
    work = functools.partial(_played, sums=sums)
    results, seconds, hung = _on_ranks(work, script, script.timeout or limit)
    ranks = [Seen(error="no answer") if seen is None else seen for seen in results]
    return Played(tuple(ranks), seconds, hung)


def total(runs: list[Seen]) -> float:
    """The sum of the losses, a loss that is the same on several ranks counted once."""
    at_once = itertools.zip_longest(*(seen.losses for seen in runs))
    return sum(sum({round(x, 11): x for x in losses if x is not None}.values()) for losses in at_once)


def derivatives(script: Script, limit: float = 120.0) -> list[Derivative]:
    """Hold the gradients of a script's first optimizer step against differences of its losses.

    Raises:
        RuntimeError: a rank raised, or did not answer.
    """
    results, _, hung = _on_ranks(_derived, script, limit)
    if hung or None in results:
        raise RuntimeError(f"{script.name}: no answer")
    errors = [seen.error for runs in results for seen in runs if seen.error]
    if errors:
        raise RuntimeError(f"{script.name}: {errors[0]}")
    found = []
    for at, key in enumerate(results[0][0].dots):
        plus, minus = (total([runs[1 + 2 * at + sign] for runs in results]) for sign in (0, 1))
        true = (plus - minus) / (2 * STEP)
        dots = [list(runs[0].dots.values())[at] for runs in results]
        said = [sum(value for _, value in dots)] if dots[0][0] else [value for _, value in dots]
        found.append(Derivative(key, tuple(value / true if true else float("nan") for value in said), true))
    return found
