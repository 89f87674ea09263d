"""A loss of all samples together, of an encoder that can hold a part of them: `cached_gradients`.

Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, 2021.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from gradmesh.arguments import Call, integer
from gradmesh.axis import AxisLike
from gradmesh.collectives import all_reduce
from gradmesh.no_sync import no_sync
from gradmesh.order import backward
from gradmesh.state import rank_state
from gradmesh.types import I

__all__ = ["cached_gradients"]

_OP = "nn.cached_gradients"


def cached_gradients(
    encode: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Tensor | Sequence[Tensor],
    loss: Callable[..., Tensor],
    chunk: int,
    axis: AxisLike = None,
    *,
    modules: Iterable[nn.Module] = (),
    scale: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    r"""Run forward and backward of a loss of all embeddings, with the graph of one chunk's encoder in memory at a time.

    ::

        chunk by chunk:   embeddings = encode(inputs), without a graph
                          loss(embeddings).backward(), as far as the embeddings
        chunk by chunk:   encode(inputs) again, with a graph, and the embeddings' gradients through it

    The gradients that are added to `.grad` are those of `loss(*encode(*inputs)).backward()`. The second time the random
    numbers are those of the first, so that dropout is the same. Gradients are summed over the ranks once, by the last
    chunk: the others run in `gm.no_sync()`, in DDP's and FSDP1's `no_sync`, and with `fully_shard`'s
    `set_requires_gradient_sync(False)`. Every rank takes the same number of chunks, so that a rank with fewer samples
    has smaller or empty ones.

    Args:
        encode: returns embeddings, a row for each sample, or a tuple of them. What it returns without dimensions, such
            as a scale, is handed on once, and its gradient goes back through the last chunk.
        inputs: what `encode` takes, with a row for each of this rank's samples.
        loss: is called with what `encode` returned, of all of this rank's samples; returns a loss to call `backward`
            on, on every rank.
        chunk: how many samples `encode` is given at most.
        axis: the ranks that have to take the same number of chunks.
        modules: where to look for wrappers; `encode` itself, if it is a module, need not be named.
        scale: what backward starts from instead of the loss, as a GradScaler's `scale`.

    Returns:
        The loss, detached.

    Raises:
        ArgumentError: a chunk that is no number, inputs with different numbers of rows, or outputs that have neither a
            row for each sample nor no dimension.

    A module that counts what it sees, such as batch norm, sees every chunk by itself, and twice. Ranks that are threads
    share one generator of random numbers, so that dropout needs ranks that are processes.

    Example:
        >>> def on_each_rank():
        ...     torch.manual_seed(0)
        ...     encoder, x = torch.nn.Linear(3, 2), torch.randn(4, 3)[2 * gm.rank() :][:2]
        ...     loss = gm.nn.cached_gradients(
        ...         lambda x: (encoder(x), encoder(-x)), x, lambda a, b: gm.nn.clip_loss(a, b, 1.0), chunk=1
        ...     )
        ...     return loss.requires_grad, tuple(encoder.weight.grad.shape)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(False, (2, 3)), (False, (2, 3))]
    """
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    parts = _chunks(given, chunk, axis)
    devices = sorted({x.get_device() for x in given if x.is_cuda})
    states: list[Any] = []
    found: list[tuple[Tensor, ...]] = []
    with torch.no_grad():
        for part in parts:
            states.append(_random_state(devices))
            found.append(_outputs(encode, part, axis))
    whole = [_leaf(pieces) for pieces in zip(*found, strict=True)]
    value = loss(*whole)
    _run(value if scale is None else scale(value))
    wrappers = list(_wrappers([*modules, *([encode] if isinstance(encode, nn.Module) else [])]))
    at = [0] * len(whole)
    for number, (part, state) in enumerate(zip(parts, states, strict=True)):
        last = number == len(parts) - 1
        with contextlib.ExitStack() as stack:
            if not last:
                stack.enter_context(no_sync())
                for wrapper in wrappers:
                    stack.enter_context(_unsynced(wrapper))
            with torch.random.fork_rng(devices):
                _set_random_state(state, devices)
                again = _outputs(encode, part, axis)
            pairs = []
            for place, (x, leaf) in enumerate(zip(again, whole, strict=True)):
                if leaf.grad is None or (leaf.dim() == 0 and not last):
                    continue
                pairs.append((x, leaf.grad if leaf.dim() == 0 else leaf.grad[at[place] :][: len(x)]))
                at[place] += len(x) if leaf.dim() else 0
            _run_through([(x, grad) for x, grad in pairs if x.requires_grad])
    return value.detach()


def _chunks(given: tuple[Tensor, ...], chunk: int, axis: AxisLike) -> list[tuple[Tensor, ...]]:
    """The inputs in as many parts as any rank needs."""
    call = Call(_OP, given[0] if given else torch.empty(0), axis)
    size = integer(chunk)
    rows = {len(x) if isinstance(x, Tensor) and x.dim() else -1 for x in given}
    if size is None or size < 1 or len(rows) != 1 or -1 in rows:
        call.fail(
            "there are no chunks",
            expected="inputs with a row for each sample, and chunk an int of 1 or more",
            got=f"chunk={chunk!r} of {[list(getattr(x, 'shape', ())) for x in given]}",
            remedy="pass tensors with equally many rows",
        )
    needed = torch.tensor(-(-rows.pop() // size), device=given[0].device)
    count = max(int(all_reduce(needed, call.axis, op="max", dst=I)), 1)
    return list(zip(*(x.tensor_split(count) for x in given), strict=True))


def _outputs(encode: Callable[..., Any], part: tuple[Tensor, ...], axis: AxisLike) -> tuple[Tensor, ...]:
    found = encode(*part)
    outputs = (found,) if isinstance(found, Tensor) else tuple(found)
    for x in outputs:
        if not isinstance(x, Tensor) or (x.dim() and len(x) != len(part[0])):
            _refuse(x, len(part[0]), axis)
    return outputs


def _refuse(x: object, rows: int, axis: AxisLike) -> NoReturn:
    got = f"a tensor of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
    Call(_OP, torch.empty(0), axis).fail(
        "encode returned something else than embeddings",
        expected=f"tensors with {rows} rows, as many as it was given, or without dimensions",
        got=got,
        remedy="return a row for each sample",
    )


def _leaf(pieces: tuple[Tensor, ...]) -> Tensor:
    """What the loss is a function of."""
    whole = pieces[0].detach().clone() if pieces[0].dim() == 0 else torch.cat(pieces)
    return whole.requires_grad_(whole.is_floating_point())


def _run(loss: Tensor) -> None:
    """Backward of a loss, as a link of the chain where there is one."""
    if rank_state().chain is None:
        loss.backward()
    else:
        backward(loss)


def _run_through(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Backward of outputs whose gradients are known."""
    if rank_state().chain is not None:
        backward(sum(((x * grad).sum() for x, grad in pairs), torch.zeros(())) if pairs else None)
    elif pairs:
        torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])


def _random_state(devices: list[int]) -> Any:
    return torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]


def _set_random_state(state: Any, devices: list[int]) -> None:
    torch.set_rng_state(state[0])
    for device, each in zip(devices, state[1], strict=True):
        torch.cuda.set_rng_state(each, device)


def _wrappers(modules: list[nn.Module]) -> Iterator[nn.Module]:
    """The outermost of the modules whose gradients are reduced over ranks."""
    for module in modules:
        if hasattr(module, "no_sync") or hasattr(module, "set_requires_gradient_sync"):
            yield module
        else:
            yield from _wrappers(list(module.children()))


@contextlib.contextmanager
def _unsynced(wrapper: Any) -> Iterator[None]:
    """Have a wrapper keep its gradients to itself."""
    if hasattr(wrapper, "no_sync"):
        with wrapper.no_sync():
            yield
        return
    wrapper.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        wrapper.set_requires_gradient_sync(True)
