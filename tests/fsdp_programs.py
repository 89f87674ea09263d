"""Models that hold collectives, sharded by torch's wrappers or by the verbs, and what a training leaves of them."""

from __future__ import annotations

import contextlib
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.functional import normalize

import gradmesh as gm

_example = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "sharded.py"))
Sharded: Any = _example["Sharded"]
clip: Callable[[nn.Module, str, float], float] = _example["clip"]

State = dict[str, dict[str, Any]]
SIZES, ROWS = (5, 2), 7
"""The rows of each of two ranks, and of both."""

WHOLE = StateDictOptions(full_state_dict=True)
SGD: Callable[..., torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
ADAM: Callable[..., torch.optim.Optimizer] = lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-3)


class Attends(nn.Module):
    """Each row looks at the rows of all ranks: a gather in the middle of the network."""

    def forward(self, x: Tensor) -> Tensor:
        every = gm.all_gather(x, sizes="auto")
        return x + (x @ every.T).softmax(1) @ every


class Tower(nn.Sequential):
    """An encoder; `norm` makes its norm."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__(nn.Linear(width, 8), norm(8), nn.Tanh(), Attends(), nn.Linear(8, 4))


class Towers(nn.Module):
    """Two encoders and a contrastive loss of the rows of all ranks, the same on every rank."""

    def __init__(self, synced: bool = True) -> None:
        super().__init__()
        norm: Callable[[int], nn.Module] = gm.nn.SyncBatchNorm if synced else nn.LayerNorm
        self.image, self.text = Tower(5, norm), Tower(3, norm)
        self.loss = gm.nn.ClipLoss(dst=gm.R, learnable=synced)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made: Tensor = self.loss(normalize(self.image(x), dim=1), normalize(self.text(y), dim=1))
        return made


def towers(synced: bool = True, dtype: torch.dtype = torch.float64) -> Towers:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Towers(synced).to(dtype)


def data(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """This rank's rows of a batch; ranks have different numbers of them."""
    draw = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ROWS, width, generator=draw, dtype=dtype) for width in (5, 3))
    own = gm.axis().slice(SIZES if gm.world_size() == 2 else ROWS)
    return x[own], y[own]


def wrapped(kind: str, net: Towers) -> nn.Module:
    """The model, sharded in one of the ways, or as it is."""
    if kind.startswith("FullyShardedDataParallel"):
        lower = MixedPrecision(torch.float32, torch.float32, torch.float32)
        return FullyShardedDataParallel(
            net,
            auto_wrap_policy=ModuleWrapPolicy({Tower}),
            device_id=torch.device("cpu"),
            use_orig_params="original" in kind,
            mixed_precision=lower if "mixed" in kind else None,
        )
    if kind == "fully_shard":
        for module in (net.image, net.text, net):
            fully_shard(module, mesh=gm.mesh(dp=-1))
    if kind == "verbs":
        for name in ("image", "text"):
            setattr(net, name, Sharded(getattr(net, name)))
    return net


def passing(net: nn.Module, last: bool) -> contextlib.AbstractContextManager[Any]:
    """Where a micro-batch that is not the last one runs."""
    if isinstance(net, FSDPModule):
        net.set_requires_gradient_sync(last)
    if isinstance(net, FullyShardedDataParallel) and not last:
        return cast("contextlib.AbstractContextManager[Any]", net.no_sync())
    return contextlib.nullcontext()


def stepped(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    *,
    micro: int = 1,
    limit: float | None = None,
    averaged: Any = None,
) -> list[float]:
    """Train, and return the losses, and the norms of the gradients that were clipped."""
    figures = []
    for step in steps:
        optimizer.zero_grad()
        for part in range(micro):
            with passing(net, part == micro - 1):
                loss = net(*data(10 * step + part, next(net.parameters()).dtype))
                by = net if averaged is None else averaged
                loss = gm.objective(loss, loss_type=gm.R, ddp=by, steps=micro)
                loss.backward()
            figures.append(loss.item())
        if limit is not None:
            figures.append(clipped(net, limit))
        optimizer.step()
    return figures


def clipped(net: nn.Module, limit: float) -> float:
    if any(isinstance(part, Sharded) for part in net.modules()):
        return clip(net, "verbs", limit)
    if isinstance(net, FullyShardedDataParallel):
        return net.clip_grad_norm_(limit).item()
    found = nn.utils.clip_grad_norm_(net.parameters(), limit)
    return (found.full_tensor() if isinstance(found, DTensor) else found).item()


def sharded(net: nn.Module) -> dict[str, Any]:
    """What the verbs have sharded, by name."""
    return {name: part for name, part in net.named_modules() if isinstance(part, Sharded)}


def left(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that is kept, whole, on every rank: parameters, buffers, and the optimizer's state."""
    if parts := sharded(net):
        state = to_full(net, optimizer)
        found = {f"{at}.{n}": v for at, part in parts.items() for n, v in part.whole(part.own).items()}
        found |= dict(net.named_buffers())
    else:
        state = state_of(net, optimizer)
        found = dict(get_model_state_dict(net, options=WHOLE))
    found |= {f"{name} {key}": v for name, kept in state.items() for key, v in kept.items()}
    return {name: v.detach().clone() for name, v in found.items() if isinstance(v, Tensor)}


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """A wrapped optimizer's state by the names of the parameters, whole."""
    state: Any = get_optimizer_state_dict(net, optimizer, options=WHOLE)["state"]
    return dict(state)


def to_full(net: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The optimizer's state by the names of the parameters, whole, out of what each rank has of it."""
    state: State = {}
    for at, part in sharded(net).items():
        for key, kept in optimizer.state[part.own].items():
            whole = part.whole(kept) if kept.dim() else dict.fromkeys(part.names, kept)
            for name, value in whole.items():
                state.setdefault(f"{at}.{name}", {})[key] = value
    return state


def from_full(net: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """The way back: each rank takes its slice."""
    for at, part in sharded(net).items():
        for key in state[f"{at}.{part.names[0]}"]:
            whole = [state[f"{at}.{name}"][key] for name in part.names]
            flat = torch.cat([each.flatten() for each in whole]) if whole[0].dim() else whole[0]
            optimizer.state[part.own][key] = gm.shard(flat) if flat.dim() else flat.clone()


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference between what two trainings left."""
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)
