"""A right program of the zoo as a script that trains with it, for `gradmesh check`.

$ torchrun --nproc-per-node 2 -m tests.zoo.stepping NAME
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

import gradmesh as gm
from gradmesh.verify import Input, Shard
from tests.zoo import PROGRAMS
from tests.zoo.data import normal
from tests.zoo.program import Program

__all__ = ["NAMES", "main"]

_REPEATED = ("_invariant",)
"""In the names of verbs whose result all ranks use alike."""
_PARTED = ("verb_shard_replicated", "verb_convert", "verb_convert_to_invariant")
"""Those whose operand is replicated: each rank gets a part of its gradient."""
STEPS = 2


def is_suited(program: Program) -> bool:
    """Whether a script can train with a right program: of the audits' with the verbs, whose types are known."""
    known = program.check != "audit" or program.name.startswith("verb_")
    # Whose cut layers are filled by the check that the program is of.
    return program.expected is None and known and program.name != "trained_tensor_parallel"


NAMES = [name for name, program in PROGRAMS.items() if is_suited(program)]


def trained(x: Any) -> Any:
    """A tensor as a parameter."""
    if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
        return nn.Parameter(x.detach().clone())
    return x


def inputs_of(given: Any) -> tuple[list[Any], list[Tensor], list[Tensor]]:
    """What a program takes, the parameters in it, and those of type R, each rank's gradient of which is a part."""
    made, held, parted = [], [], []
    for each in given if isinstance(given, tuple) else (given,):
        kind = each.type if isinstance(each, Input) else gm.V
        value = each.value if isinstance(each, Input) else each
        if isinstance(value, nn.Module):
            own = list(value.parameters())
            if not isinstance(each, Input):  # a copy on each rank, but where it is cut
                parted += [x for x in own if not isinstance(x, DTensor)]
        else:
            value = value if kind is None else tree_map(trained, value)
            own = [x for x in tree_leaves(value) if isinstance(x, nn.Parameter)]
        made.append(value)
        held += own
        parted += own if kind is gm.R else []
    return made, held, parted


def of_an_audit(program: Program) -> tuple[Any, list[Any], list[Tensor], list[Tensor]]:
    """A verb, and a loss that weighs each entry of its result, on each rank otherwise where that is its type."""
    fn, given = program.build()
    made, held, parted = inputs_of(given)
    whose = 0 if any(text in program.name for text in _REPEATED) else dist.get_rank()

    def loss(*inputs: Any) -> Tensor:
        found = [y for y in tree_leaves(fn(*inputs)) if isinstance(y, Tensor) and y.requires_grad]
        return torch.stack([(normal(7 + whose, *y.shape) * y.sin()).sum() for y in found]).sum()

    return loss, made, held, held if program.name in _PARTED else parted


def of_a_training(program: Program) -> tuple[Any, list[Any], list[Tensor], list[Tensor]]:
    """A model that is trained on this rank's part of the rows."""
    told = program.build()
    model = told["module"]().double()
    model = told.get("parallel", lambda whole: whole)(model)
    own = [_part(x) for x in told["inputs"]]
    held = list(model.parameters())
    return told["distributed"], [model, *own], held, [] if "parallel" in told else held


def _part(x: Any) -> Any:
    if not isinstance(x, Shard) or x.value is None:
        return x
    sizes = x.sizes or [len(rows) for rows in x.value.tensor_split(dist.get_world_size())]
    return x.value.split(list(sizes))[dist.get_rank()]


@contextlib.contextmanager
def one_order(program: Program) -> Iterator[Any]:
    """What runs backward."""
    if program.options.get("ordered") or program.check == "audit":
        with gm.ordered():
            yield gm.backward
    else:
        yield lambda loss: loss.backward()


def main(name: str) -> None:
    """Two steps."""
    gm.init("gloo")
    program = PROGRAMS[name]
    if program.check == "audit":
        loss, made, held, parted = of_an_audit(program)
    elif program.check == "same_as_single":
        loss, made, held, parted = of_a_training(program)
    else:
        loss, given = program.build()
        made, held, parted = inputs_of(given(dist.get_rank()))
    optimizer = torch.optim.SGD(held, lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with one_order(program) as backward:
            backward(loss(*made))
        for x in parted:
            if x.grad is not None:
                dist.all_reduce(x.grad)
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
