"""`cached_gradients` (GradCache): large contrastive batches with an encoder that runs in chunks.

Source: Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, 2021.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradmesh._util.call_sites import call_site
from gradmesh.autograd.deferred import no_sync
from gradmesh.autograd.ordered import backward
from gradmesh.errors import CheckWarning, message
from gradmesh.runtime.checking import FULL
from gradmesh.runtime.mesh import AxisLike
from gradmesh.runtime.state import check_level, rank_state
from gradmesh.transport.run import constants, exchange_device
from gradmesh.types import I
from gradmesh.verbs.call import Call, integer
from gradmesh.verbs.collectives import all_reduce


class Replay:
    """Snapshots of random number generators and buffers, for a second run of the same calls of modules."""

    def __init__(self, modules: Iterable[nn.Module], inputs: Iterable[Tensor]) -> None:
        every = {id(part): part for module in modules for part in module.modules()}.values()
        here = [*inputs, *(p for part in every for p in part.parameters(recurse=False))]
        found = {x.device.index for x in here if x.is_cuda}
        # The call may move its inputs to the current device.
        self._devices = sorted(
            found | ({torch.cuda.current_device()} if torch.cuda.is_initialized() else set())
        )
        self._states: list[Any] = []
        self._buffers = [
            (part, name, x, x.detach().clone())
            for part in every
            if part.training
            for name, x in part.named_buffers(recurse=False)
        ]

    def note(self) -> None:
        """Save the generators' states before a call of the first run."""
        self._states.append((torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in self._devices]))

    @torch.no_grad()
    def rewind(self) -> None:
        """Restore the buffers that the first run changed."""
        for part, name, x, before in self._buffers:
            # Compare values: batch norm's writes do not change the version counter. Do not write unchanged buffers,
            # which other graphs may have saved.
            if not torch.equal(x, before):
                x.copy_(before)
            if getattr(part, name) is not x:
                setattr(part, name, x)

    @contextlib.contextmanager
    def numbers(self, call: int) -> Iterator[None]:
        """Use the random numbers of a call's first run; afterwards restore the current state."""
        here, there = self._states[call]
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(here)
            for device, state in zip(self._devices, there, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield


_OP = "nn.cached_gradients"
_FAR = 0.05
"""Relative difference between the two runs of a chunk that rounding cannot explain, not even in bfloat16."""

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
    r"""Forward and backward of a loss over all embeddings, with one chunk's graph of the encoder in memory at a time.

    ::

        chunk by chunk:   embeddings = encode(inputs), without a graph
                          loss(embeddings).backward(), up to the embeddings
        chunk by chunk:   encode(inputs) again, with a graph; backward from the embeddings' gradients

    The gradients that are added to `.grad` are those of `loss(*encode(*inputs)).backward()`. The second run of a chunk
    uses the random numbers and the modules' buffers of the first: dropout is the same, and running statistics are
    updated once. Gradients are reduced over the ranks once, by the last chunk: the others run in `gm.no_sync()`, in
    DDP's and FSDP1's `no_sync`, and with `fully_shard`'s `set_requires_gradient_sync(False)`. Every rank runs the same
    number of chunks; a rank with fewer samples has smaller or empty ones.

    Args:
        encode: returns embeddings with a row for each sample, or a tuple of them. A 0-dim output, such as a scale, is
            passed to `loss` once, and its gradient flows through the last chunk.
        inputs: the arguments of `encode`, with a row for each of this rank's samples.
        loss: called with the outputs of `encode` for all of this rank's samples; returns a loss that every rank would
            call `backward` on.
        chunk: maximum number of samples per call of `encode`.
        axis: the ranks that run the same number of chunks.
        modules: the modules that `encode` calls, for their wrappers and buffers; not needed if `encode` is the module.
        scale: maps the loss to the tensor that backward starts from, such as a GradScaler's `scale`.

    Returns:
        The loss, detached.

    Raises:
        ArgumentError: `chunk` is not a positive int; the inputs have different numbers of rows, or a graph; an output
            of `encode` has neither a row for each sample nor 0 dimensions; `loss` does not return a scalar with a
            graph.

    Source: Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, 2021 (GradCache).

    Batch norm uses the statistics of each chunk. `gm.check("full")` warns if the second run of a chunk gives other
    embeddings than the first.

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
    scaled = value if scale is None else scale(value)
    if _ordered():
        backward(scaled)
    else:
        scaled.backward()
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
    """The inputs, split into as many chunks as the rank with the most samples needs."""
    size = integer(chunk)
    rows = {len(x) if isinstance(x, Tensor) and x.dim() else -1 for x in given}
    if size is None or size < 1 or len(rows) != 1 or -1 in rows:
        call.fail(
            "cannot split the inputs into chunks",
            expected="chunk an int >= 1, and inputs with equal numbers of rows (one for each sample)",
            got=f"chunk={chunk!r}, inputs of shapes {[list(getattr(x, 'shape', ())) for x in given]}",
            remedy="pass e.g. chunk=64"
            if size is None or size < 1
            else "pass tensors with one row for each sample, e.g. images (n, 3, 32, 32) and tokens (n, 77)",
        )
    if any(x.requires_grad and not x.is_leaf for x in given):
        call.fail(
            "an input has a graph, which the first chunk's backward would free",
            expected="inputs without a grad_fn",
            got=f"{[x.grad_fn for x in given]}",
            remedy="compute it in encode, or pass y = x.detach().requires_grad_() and call x.backward(y.grad) after",
        )
    needed = constants([-(-rows.pop() // size)], exchange_device(call.axis, given[0]))
    count = max(int(all_reduce(needed, call.axis, op="max", dst=I)), 1)
    return list(zip(*(x.tensor_split(count) for x in given), strict=True))


def _outputs(
    call: Call, encode: Callable[..., Any], part: tuple[Tensor, ...], wanted: int | None
) -> _Outputs:
    """The checked outputs of `encode` for a chunk; `wanted` is the number of outputs of earlier chunks."""
    found, rows = encode(*part), len(part[0])
    outputs: Any = (found,) if isinstance(found, Tensor) else found
    if (
        not isinstance(outputs, (tuple, list))
        or not all(isinstance(x, Tensor) and (not x.dim() or len(x) == rows) for x in outputs)
        or wanted not in (None, len(outputs))
    ):
        call.fail(
            "encode returned invalid outputs",
            expected=f"{'' if wanted is None else f'{wanted} '}tensors with {rows} rows (one for each sample of the "
            "chunk) or 0 dimensions; as many in every chunk",
            got=", ".join(map(_kind, outputs)) if isinstance(outputs, (tuple, list)) else _kind(outputs),
            remedy=f"return a tensor of shape ({rows}, features), or a tuple of them",
        )
    return tuple(outputs)


def _kind(x: object) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"shape {list(x.shape)}{'' if x.requires_grad else ' without a gradient'}"


def _check(call: Call, value: object) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1 or not (value.requires_grad or _ordered()):
        call.fail(
            "loss did not return a scalar that requires grad",
            expected="a tensor of one element, computed from the embeddings with gradients enabled",
            got=_kind(value),
            remedy="reduce the loss, e.g. by .mean(), and call cached_gradients outside of torch.no_grad()",
        )


def _compare(call: Call, again: _Outputs, first: _Outputs) -> None:
    """Warn if the second run of a chunk differs from the first."""
    for x, y in zip(again, first, strict=True):
        off = float((x.detach() - y).abs().max()) if x.numel() else 0.0
        if off > _FAR * float(y.abs().max() if y.numel() else 0):
            site = call_site()
            text = message(
                "the second run of a chunk gave other embeddings than the first, so the gradients are wrong",
                op=_OP,
                axis=str(call.axis),
                got=f"a difference of {off:.2g}",
                remedy="pass the modules that encode calls, e.g. modules=[model], and draw random numbers from torch's "
                "default generators",
            )
            where = ("<unknown>", 0) if site is None else (site[0].co_filename, site[1])
            warnings.warn_explicit(text, CheckWarning, *where)
            return


def _leaf(pieces: tuple[Tensor, ...]) -> Tensor:
    """The outputs of all chunks as one leaf."""
    whole = pieces[0].detach().clone() if pieces[0].dim() == 0 else torch.cat(pieces)
    return whole.requires_grad_(whole.is_floating_point() or whole.is_complex())


def _ordered() -> bool:
    return rank_state().of_thread.chain is not None


def _run_through(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Backward from outputs with given gradients."""
    if _ordered():
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
    """Disable a wrapper's gradient reduction."""
    if hasattr(wrapper, "no_sync"):
        with wrapper.no_sync():
            yield
        return
    wrapper.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        wrapper.set_requires_gradient_sync(True)
