"""A rank without data for a module takes part in what FSDP and DDP send for it.

FSDP gathers a module's parameters when it is called, and reduces their gradients when backward reaches it; DDP reduces
a bucket once its parameters have gradients. A rank that skips the module leaves the others waiting.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradmesh._util.structure import tensors_in
from gradmesh.errors import ArgumentError


def skipped(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    r"""A zero to add to the loss of a rank that has no data for a module.

    ::

        V -> V    -> ()    0; in backward every parameter of the module gets a gradient of zeros

    Call it where the other ranks call the module, and add it to the loss.

    Args:
        module: what this rank skips, all of a model or a part of it.
        args: an example of the input, such as one sample of zeros: the module computes with it, so that it sends what
            it sends on the other ranks, in the same order, and the result is dropped. Its derivative has to be finite,
            and statistics of batches see it. `fully_shard` reduces gradients in an order that depends on whether an
            input requires grad: let the example require it where the others' do.
            Without an example the module does not compute. That is enough for a module without FSDP or DDP inside that
            sends nothing itself, such as a part of a model that is wrapped as a whole.
        kwargs: like `args`.

    Returns:
        Zero, of shape (). It requires grad where the results, or the parameters, do.

    Raises:
        ArgumentError: there is no example, and FSDP or DDP is inside of the module, or it has no parameters; the
            module returns no tensor for the example, or none that requires grad although its parameters do.

    Example:
        >>> import torch, gradmesh as gm
        >>> vision = torch.nn.Linear(3, 1)
        >>> images = torch.ones(0, 3)
        >>> loss = vision(images).sum() if len(images) else gm.nn.skipped(vision)
        >>> loss.backward()
        >>> vision.weight.grad
        tensor([[0., 0., 0.]])
    """
    if args or kwargs:
        used = list(tensors_in(module(*args, **kwargs)))
    elif any(isinstance(part, _wrappers()) for part in module.modules()):
        _refuse(
            module,
            "it has parts in FSDP or DDP, which send when they are called",
            "pass an example of the module's input: gm.nn.skipped(module, torch.zeros(1, ...))",
        )
    else:  # FSDP1 puts views of its flat parameter among the attributes, where module.parameters() has none
        attributes = [value for part in module.modules() for value in vars(part).values()]
        found = (x for x in (*module.parameters(), *attributes) if isinstance(x, Tensor))
        used = list({id(x): x for x in found}.values())
        if not used:
            _refuse(module, "it has no parameters", "leave out the call: such a module needs none")
    if not used:
        _refuse(
            module, "its result for the example has no tensor", "pass an example for which it returns tensors"
        )
    trained = [x for x in used if x.requires_grad]
    if not trained and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
        _refuse(
            module,
            "its result for the example has no tensor that requires grad, and its parameters do",
            "pass an example whose result depends on the parameters, and is not detached",
        )
    # In a dtype that leaves a loss's as it is when it is added.
    dtype = next((x.dtype for x in trained or used if x.is_floating_point()), torch.float32)
    zero = torch.zeros((), dtype=dtype, device=used[0].device)
    for x in trained:
        local: Tensor = x.to_local() if hasattr(x, "to_local") else x  # of a DTensor
        none = local.reshape(-1)[:0].sum()  # of no element, so that no value is used, be it NaN
        zero = zero + none.real.to(zero.dtype)
    return zero


def _wrappers() -> tuple[type, ...]:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # not imported here: that takes long
    return (DistributedDataParallel, *((fsdp.FullyShardedDataParallel, fsdp.FSDPModule) if fsdp else ()))


def _refuse(module: nn.Module, problem: str, remedy: str) -> NoReturn:
    text = f"{type(module).__name__} cannot be skipped: {problem}"
    raise ArgumentError.of(text, op="nn.skipped", remedy=remedy)
