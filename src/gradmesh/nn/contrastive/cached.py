"""A loss of all samples together, of an encoder that can hold a part of them: `cached_gradients`.

Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, 2021.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradmesh.arguments import Call, integer
from gradmesh.axis import AxisLike
from gradmesh.call_sites import call_site
from gradmesh.checking import FULL, check_level
from gradmesh.collectives import all_reduce
from gradmesh.errors import CheckWarning, message
from gradmesh.nn.contrastive.replay import Replay
from gradmesh.no_sync import no_sync
from gradmesh.order import backward
from gradmesh.state import rank_state
from gradmesh.types import I

__all__ = ["cached_gradients"]

_OP = "nn.cached_gradients"
_FAR = 0.05
"""The part of the largest embedding by which no rounding makes a second run differ, not even of bfloat16."""

_Outputs = tuple[Tensor, ...]


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
    numbers and the modules' buffers are those of the first, so that dropout is the same, and running statistics are
    taken once. Gradients are summed over the ranks once, by the last
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
        modules: those that `encode` calls, for their wrappers and their buffers; `encode` itself, if it is a module,
            need not be named.
        scale: what backward starts from instead of the loss, as a GradScaler's `scale`.

    Returns:
        The loss, detached.

    Raises:
        ArgumentError: a chunk that is no number, inputs with different numbers of rows or with a graph behind them,
            outputs that have neither a row for each sample nor no dimension, a loss that is none.

    Batch norm sees every chunk by itself. `gm.check("full")` warns where the second run of a chunk is not like the
    first.

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
    call = Call(_OP, given[0] if given else torch.empty(0), axis)
    parts = _chunks(call, given, chunk)
    parents = [*modules, *([encode] if isinstance(encode, nn.Module) else [])]
    replay, found = Replay(parents, given), list[tuple[Tensor, ...]]()
    with torch.no_grad():
        for part in parts:
            replay.note()
            found.append(_outputs(call, encode, part, len(found[0]) if found else None))
    replay.rewind()  # before the loss, which may have buffers of its own to change
    whole = [_leaf(pieces) for pieces in zip(*found, strict=True)]
    value = loss(*whole)
    _check(call, value)
    _run(value if scale is None else scale(value))
    wrappers = list(_wrappers(parents))
    at = [0] * len(whole)
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        with contextlib.ExitStack() as stack:
            if not last:
                stack.enter_context(no_sync())
                for wrapper in wrappers:
                    stack.enter_context(_unsynced(wrapper))
            with replay.numbers(number):
                again = _outputs(call, encode, part, len(whole))
            if check_level() == FULL:
                _compare(call, again, found[number])
            pairs = []
            for place, (x, leaf) in enumerate(zip(again, whole, strict=True)):
                if leaf.grad is None or (leaf.dim() == 0 and not last):
                    continue
                pairs.append((x, leaf.grad if leaf.dim() == 0 else leaf.grad[at[place] :][: len(x)]))
                at[place] += len(x) if leaf.dim() else 0
            _run_through([(x, grad) for x, grad in pairs if x.requires_grad])
    return value.detach()


def _chunks(call: Call, given: tuple[Tensor, ...], chunk: int) -> list[tuple[Tensor, ...]]:
    """The inputs in as many parts as any rank needs."""
    size = integer(chunk)
    rows = {len(x) if isinstance(x, Tensor) and x.dim() else -1 for x in given}
    if size is None or size < 1 or len(rows) != 1 or -1 in rows:
        call.fail(
            "there are no chunks",
            expected="inputs with a row for each sample, and chunk an int of 1 or more",
            got=f"chunk={chunk!r} of {[list(getattr(x, 'shape', ())) for x in given]}",
            remedy="pass tensors with equally many rows",
        )
    if any(x.requires_grad and not x.is_leaf for x in given):
        call.fail(
            "an input has a graph behind it, that each chunk's backward would run and free",
            expected="inputs that are data, or leaves",
            got=f"{[x.grad_fn for x in given]}",
            remedy="have encode compute it, or detach it and run its backward from the input's .grad",
        )
    needed = torch.tensor(-(-rows.pop() // size), device=given[0].device)
    count = max(int(all_reduce(needed, call.axis, op="max", dst=I)), 1)
    return list(zip(*(x.tensor_split(count) for x in given), strict=True))


def _outputs(
    call: Call, encode: Callable[..., Any], part: tuple[Tensor, ...], wanted: int | None
) -> _Outputs:
    """What encode makes of a chunk.

    Args:
        call: the caller's.
        encode: as there.
        part: the chunk.
        wanted: how many outputs there were before.
    """
    found, rows = encode(*part), len(part[0])
    outputs: Any = (found,) if isinstance(found, Tensor) else found
    if (
        not isinstance(outputs, tuple | list)
        or not all(isinstance(x, Tensor) and (not x.dim() or len(x) == rows) for x in outputs)
        or wanted not in (None, len(outputs))
    ):
        call.fail(
            "encode returned something else than embeddings",
            expected=f"{'' if wanted is None else f'{wanted} '}tensors with {rows} rows, as many as it was given, or "
            "without dimensions; as many in every chunk",
            got=", ".join(map(_kind, outputs)) if isinstance(outputs, tuple | list) else _kind(outputs),
            remedy="return a row for each sample",
        )
    return tuple(outputs)


def _kind(x: object) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"shape {list(x.shape)}{'' if x.requires_grad else ' without a gradient'}"


def _check(call: Call, value: object) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1 or not (value.requires_grad or _chained()):
        call.fail(
            "there is no loss to run the backward of",
            expected="one number, computed from the embeddings with gradients switched on",
            got=_kind(value),
            remedy="return a mean or a sum, and call cached_gradients outside of torch.no_grad()",
        )


def _compare(call: Call, again: _Outputs, first: _Outputs) -> None:
    """Warn where the second run of a chunk is far from the first."""
    for x, y in zip(again, first, strict=True):
        off = float((x.detach() - y).abs().max()) if x.numel() else 0.0
        if off > _FAR * float(y.abs().max() if y.numel() else 0):
            site = call_site()
            text = message(
                "the second run of a chunk has other embeddings than the first, so that gradients are not theirs",
                op=_OP,
                axis=str(call.axis),
                got=f"a difference of {off:.2g}",
                remedy="name the modules in modules=, and draw random numbers from torch's default generators",
            )
            place = ("<unknown>", 0) if site is None else (site[0].co_filename, site[1])
            warnings.warn_explicit(text, CheckWarning, *place)
            return


def _leaf(pieces: tuple[Tensor, ...]) -> Tensor:
    """What the loss is a function of."""
    whole = pieces[0].detach().clone() if pieces[0].dim() == 0 else torch.cat(pieces)
    return whole.requires_grad_(whole.is_floating_point() or whole.is_complex())


def _chained() -> bool:
    return rank_state().chain is not None


def _run(loss: Tensor) -> None:
    """Backward of a loss, as a link of the chain where there is one."""
    if _chained():
        backward(loss)
    else:
        loss.backward()


def _run_through(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Backward of outputs whose gradients are known."""
    if _chained():
        backward(sum(((x * grad.conj()).real.sum() for x, grad in pairs), torch.zeros(())) if pairs else None)
    elif pairs:
        torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])


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
