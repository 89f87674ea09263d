"""Whether the ranks' calls fit together, asked before anything is sent.

Gloo does not check. Operands whose sizes differ without having been told abort the process or leave garbage, and
different collectives hang. So for CPU tensors every forward call begins with an exchange of eight bytes, and where
these differ, every rank raises the same error with a table of what each rank called. On the shm backend the eight bytes
travel with the collective itself. A backward collective needs no check: its sizes are those of the forward one. NCCL is
not checked. GRADMESH_CHECK=0 in the environment, of every rank, turns the check off.
"""

from __future__ import annotations

import hashlib
import os
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh._torch import is_fake
from gradmesh.axis import Axis
from gradmesh.backends.claim import Claim
from gradmesh.backends.shm.group import ShmGroup
from gradmesh.call_sites import call_site, show_site
from gradmesh.errors import MismatchError, message
from gradmesh.ops import Op
from gradmesh.wire import motions as wire

__all__ = ["agree", "withdraw"]


_ON = os.environ.get("GRADMESH_CHECK") != "0"


def agree(op: Op, x: Tensor) -> None:
    """Refuse, on every rank, a call that is not the same on all of them.

    Raises:
        MismatchError: another op, other arguments, another dtype, or another size where none may differ.
    """
    axis = op.axis
    if not _ON or axis.size == 1 or not op.sends or x.device.type != "cpu" or is_fake(x):
        return
    if isinstance(axis.group, ShmGroup):
        axis.group.claim((op, x.shape, x.dtype), partial(_claim, op, x))
        return
    claim = op.claim(x)
    if len(set(_exchange(_digest(claim), axis))) == 1:
        return
    claims: list[str] = [""] * axis.size
    dist.all_gather_object(claims, _said(claim), group=axis.group)
    raise _refusal(op, claims)


def withdraw(op: Op, error: Exception) -> None:
    """Tell the others that this rank cannot make the call it announced, so that they do not wait for it."""
    if isinstance(op.axis.group, ShmGroup):
        op.axis.group.withdraw_claimed(f"{type(error).__name__}: {error}")


def _claim(op: Op, x: Tensor) -> Claim:
    claim = op.claim(x)
    return Claim(_digest(claim), partial(_said, claim), partial(_refusal, op))


def _said(claim: str) -> str:
    return f"{claim} {show_site(call_site())}"


def _refusal(op: Op, claims: list[str]) -> MismatchError:
    return MismatchError(
        message(
            "the ranks' calls do not fit together",
            op=op.verb,
            axis=str(op.axis),
            expected="the same call, with operands of the same dtype and sizes, on every rank",
            got="\n".join(f"rank {rank}: {said}" for rank, said in enumerate(claims)),
            remedy='if sizes differ on purpose, pass them, or sizes="auto"; else look where the ranks part',
        )
    )


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _exchange(number: int, axis: Axis) -> list[int]:
    ones = [1] * axis.size
    sent = torch.tensor([number] * axis.size)
    numbers: list[int] = wire.exchange(sent, ones, ones, axis, even=True).tolist()
    return numbers
