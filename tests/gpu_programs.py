"""What ranks do on GPUs, for test_gpus.py: streams, a race, compiled verbs, fused attention, autocast, a hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import gradmesh as gm

__all__ = [
    "VERBS",
    "compiled",
    "fused",
    "left_alone",
    "on_external_stream",
    "on_side_stream",
    "race",
    "scaled",
    "values",
]

VERBS: dict[str, Callable[[Tensor], Tensor]] = {
    "all_gather": lambda x: gm.all_gather(x),
    "all_reduce": lambda x: gm.all_reduce(x, dst=gm.R),
    "max": lambda x: gm.all_reduce(x, op="max", dst=gm.I),
    "all_to_all": lambda x: gm.all_to_all(x),
    "broadcast": lambda x: gm.broadcast(x),
    "halo_exchange": lambda x: gm.halo_exchange(x),
    "reduce_scatter": lambda x: gm.reduce_scatter(x),
    "scan": lambda x: gm.scan(x),
    "shift": lambda x: gm.shift(x),
    "later": lambda x: gm.all_gather(x, async_op=True).wait(),
}


def values(device: str) -> dict[str, tuple[list[float], list[float]]]:
    """Each verb's result and gradient, on the stream that is current."""
    found = {}
    for name, verb in VERBS.items():
        generator = torch.Generator().manual_seed(gm.rank())
        # Finished on this stream before anything else begins, since it comes from the host's memory.
        x = torch.randn(4 * gm.world_size(), generator=generator).to(device).requires_grad_()
        y = verb(x)
        ((1 + gm.rank()) * y**2).sum().backward()
        assert x.grad is not None
        found[name] = y.detach().cpu().tolist(), x.grad.cpu().tolist()
    return found


@contextmanager
def _behind(stream: torch.cuda.Stream) -> Iterator[None]:
    """Work on a stream that waits for pending calls, and which the rest waits for."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def on_side_stream() -> bool:
    """Whether the verbs give on a stream of torch's pool what they give on the default one."""
    expected = values("cuda")
    with _behind(torch.cuda.Stream()):
        found = values("cuda")
    return found == expected


def on_external_stream() -> bool:
    """The same on an external stream; here it is torch's own, by its address."""
    expected = values("cuda")
    owner = torch.cuda.Stream()  # has to live as long as the other name for it
    with _behind(torch.cuda.ExternalStream(owner.cuda_stream, device=owner.device)):
        found = values("cuda")
    return found == expected


def race() -> None:
    """The operand is written on the default stream while a verb reads it on another, without waiting."""
    x = torch.ones(1024, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        gm.all_gather(x)
    x.add_(1)


def _several(x: Tensor) -> Tensor:
    y = gm.all_gather(x.sin())
    z = gm.reduce_scatter(y * y)
    return gm.all_reduce(z * z, dst=gm.R) * gm.shift(z)


def compiled() -> bool:
    """Whether a compiled program of several verbs has the values and gradients that it has without the compiler."""
    found = []
    for program in (_several, torch.compile(_several, fullgraph=True)):
        generator = torch.Generator().manual_seed(gm.rank())
        x = torch.randn(8, 3, generator=generator).cuda().requires_grad_()
        y = program(x)
        found.append([y, *torch.autograd.grad(((1 + gm.rank()) * y).sum(), x)])
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*found, strict=True))


def fused() -> tuple[list[float], set[str]]:
    """Ring attention of bfloat16: its largest errors beside float64 in one process, and the kernels that ran."""
    rank, size = gm.rank(), gm.world_size()
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(2, 4, 128 * size, 64, generator=generator, dtype=torch.float64).cuda() for _ in range(4)
    ]
    *whole, grad = (x.bfloat16().double() for x in whole)
    own = slice(128 * rank, 128 * (rank + 1))
    leaves = [x[:, :, own].bfloat16().requires_grad_() for x in whole]
    with torch.profiler.profile() as profile:
        out = gm.nn.ring_attention(leaves[0], leaves[1], leaves[2], causal=True)
        found = [out, *torch.autograd.grad(out, leaves, grad[:, :, own].bfloat16())]
    dense = [x.requires_grad_() for x in whole]
    scores = dense[0] @ dense[1].mT / 8
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    expected = scores.softmax(-1) @ dense[2]
    right = [x[:, :, own] for x in (expected, *torch.autograd.grad(expected, dense, grad))]
    errors = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, right, strict=True)]
    return errors, {each.key for each in profile.key_averages() if "_attention" in each.key}


def scaled(device: str = "cuda") -> list[float]:
    """The largest errors of gradients with autocast, a scaled loss and uneven batches, beside one process."""
    rank, size, scale = gm.rank(), gm.world_size(), 1024.0
    counts = [6, *[4] * (size - 1)]
    generator = torch.Generator().manual_seed(0)
    data, target = (torch.randn(sum(counts), 16, generator=generator).to(device) for _ in range(2))
    found = []
    for alone in (True, False):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
        model = model.to(device)
        x, y = (data, target) if alone else (data.split(counts)[rank], target.split(counts)[rank])
        with torch.autocast(device, torch.bfloat16):
            out = model(x) if alone else gm.nn.Replicated(model)(x)
        loss = torch.nn.functional.mse_loss(out.float(), y)
        loss = loss if alone else gm.objective(loss, weights=len(x))
        torch.amp.GradScaler(device, init_scale=scale).scale(loss).backward()
        found.append([each.grad / scale for each in model.parameters() if each.grad is not None])
    pairs = zip(*found, strict=True)
    return [float((own - right).abs().max() / right.abs().max()) for right, own in pairs]


def left_alone() -> tuple[str, float, float]:
    """Rank 1 makes a call less, and computes; the kernel of rank 0 waits for it on the GPU.

    Returns:
        The error, the seconds until rank 0 could wait for its GPU, and those until the error.
    """
    x = torch.ones(4, device="cuda")
    gm.all_reduce(x, dst=gm.R)
    torch.cuda.synchronize()
    begin = time.monotonic()
    returned = 0.0
    try:
        if gm.rank() == 1:
            time.sleep(10)
        else:
            gm.all_reduce(x, dst=gm.R)
            torch.cuda.synchronize()
            returned = time.monotonic() - begin
        gm.all_reduce(x, dst=gm.R)
    except gm.GradmeshError as error:
        return f"{type(error).__name__}: {error}", returned, time.monotonic() - begin
    return "", returned, time.monotonic() - begin
