"""`gradmesh.check("full")`: find replicated parameters whose gradients were not summed.

A backward pass from a scalar summed with `dst=gm.I` gives each rank's parameters the gradient of that rank's term. This
is right for a parameter that differs between ranks, and for one whose gradient is summed, by `gm.replicate` or
manually. At the end of the pass the ranks compare parameters and gradients. A gradient that differs then, and is
unchanged when an optimizer uses it or when the block ends, was never summed.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradmesh._torch import after_pass, can_run_after_pass, in_plain_mode, tracing, transforms_active
from gradmesh._util.call_sites import Site
from gradmesh.autograd.averaging import Averaging, Graph
from gradmesh.errors import CheckWarning, message
from gradmesh.ops.all_gather import AllGather
from gradmesh.ops.base import LinearOp
from gradmesh.ops.sizes import EQUAL
from gradmesh.runtime.state import rank_state
from gradmesh.transport import run
from gradmesh.transport.call_checks import CallRecord, bits_of

MISSING_SUM = (
    "a parameter that is the same on every rank gets each rank's own part of its gradient",
    "use gm.replicate(parameter) where it is combined with data that differs between ranks, or sum its gradient over "
    "the ranks before the step",
)
"""The problem and the remedy; `gradmesh.typed` finds the same."""
_AVERAGED = (
    "a backward pass starts from what was summed over the ranks with dst=gm.I, and a wrapper averages the gradients",
    "if the loss was summed to be printed, declare it instead: gradmesh.objective(loss, ddp=model) has its value, and "
    "the gradient that is right where DDP or FSDP averages",
)


class _Suspect(NamedTuple):
    leaf: ref[Tensor]
    grad: int
    text: str
    site: Site


class _Suspects:
    """The parameters of this rank whose gradients differed at the end of the last passes."""

    def __init__(self) -> None:
        self.found: list[_Suspect] = []

    def report(self) -> None:
        """Warn of those whose gradients are still the same, and forget all."""
        found, self.found = self.found, []
        for one in found:
            leaf = one.leaf()
            if leaf is not None and leaf.grad is not None and _number(leaf.grad) == one.grad:
                _warn(one.text, one.site)


_lock = threading.Lock()
_hooked: list[object] = []


def compare_after_pass(op: LinearOp, node: Any, call: CallRecord) -> None:
    """Compare the gradients of the parameters behind a node of the graph at the end of the pass that runs.

    The result of the op is a scalar that is the same on every rank.
    """
    if op.axis.size == 1 or not can_run_after_pass or tracing() or transforms_active():
        return
    leaves = {id(leaf): leaf for _, _, leaf in Graph(node).edges}
    wrappers = Averaging(op.axis.size, op.axis)
    if any(wrappers.elsewhere(leaf) is not None for leaf in leaves.values()):
        _warn(_text(*_AVERAGED, op, f"the backward of {call.describe()}"), call.site)
        leaves = {}

    def compare() -> None:
        with torch.no_grad():
            in_plain_mode(lambda: _compare(op, call, list(leaves.values())))

    after_pass(compare)


def _compare(op: LinearOp, call: CallRecord, leaves: list[Tensor]) -> None:
    state, mine = rank_state(), {}
    problem, remedy = MISSING_SUM
    for leaf in leaves:
        if _comparable(leaf) and leaf.grad is not None and _comparable(leaf.grad) and not is_plain(leaf):
            mine[_number(leaf), _number(leaf.grad)] = leaf
    every = [set(pairs) for pairs in _exchanged(op, list(mine))]
    suspects = state.get_or_create(_Suspects)
    state.suspects = suspects
    for (value, grad), leaf in mine.items():
        same = all(any(value == other for other, _ in pairs) for pairs in every)
        if same and not all((value, grad) in pairs for pairs in every):
            got = (
                f"a parameter of shape {list(leaf.shape)}, whose gradient differs between ranks\n"
                f"in the backward of {call.describe()}"
            )
            suspects.found.append(
                _Suspect(ref(leaf), grad, _text(f"{problem} (missing-sum)", remedy, op, got), call.site)
            )
    with _lock:
        if not _hooked:
            _hooked.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(*_: object) -> None:
    suspects = rank_state().suspects
    if suspects is not None:
        suspects.report()


def _exchanged(op: LinearOp, pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """The pairs of every rank, of which each may have another number."""

    def gathered(numbers: list[int]) -> list[int]:
        words = "the gradients that gradmesh.check compares"
        found: list[int] = run.apply(
            AllGather(op.axis, 0, EQUAL, operand_desc=words), torch.tensor(numbers)
        ).tolist()
        return found

    counts = gathered([len(pairs)])
    most = max(counts)
    flat = (
        gathered([number for pair in pairs for number in pair] + [0] * 2 * (most - len(pairs)))
        if most
        else []
    )
    for rank, count in enumerate(counts):
        row = flat[2 * most * rank : 2 * (most * rank + count)]
        yield list(zip(row[::2], row[1::2], strict=True))


def _comparable(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and x.is_cpu and not x.is_quantized


def is_plain(x: Tensor) -> bool:
    """Whether parameters that each rank has for itself may be equal by chance: zeros, ones, or one repeated number."""
    values = x.flatten()
    return bool((values == values[:1]).all()) and (x.numel() != 1 or bool((values == 0) | (values == 1)))


def _number(x: Tensor) -> int:
    return int.from_bytes(bits_of(x, 8), "little", signed=True)


def _text(problem: str, remedy: str, op: LinearOp, got: str) -> str:
    return message(problem, op="check", axis=str(op.axis), got=got, remedy=remedy)


def _warn(text: str, site: Site) -> None:
    place = ("<unknown>", 0) if site is None else (site[0].co_filename, site[1])
    warnings.warn_explicit(text, CheckWarning, *place)
