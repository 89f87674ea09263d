"""The command that prints the table of objectives, and writes its page."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import click
import torch

import gradmesh as gm
from tools.objectives import MASKS, MESHES, RANKS, WRAPPERS, on_rank, tensor_parallel, tensor_parallel_masks

PAGE = """# The loss that is meant

Backward through gradmesh is the gradient of the sum of the ranks' losses. What is meant is mostly something else: a
mean over samples, of which ranks have different numbers, added up over micro-batches, in a wrapper that divides by
the number of ranks once more. Each of these is a factor, and each is forgotten or taken twice somewhere.
`gm.objective` is told what the loss is, and finds the factor:

```python
import torch
import gradmesh as gm

def on_each_rank():
    model = torch.nn.Linear(3, 1, bias=False)  # in training: wrapped by DDP, FSDP1 or fully_shard
    torch.nn.init.ones_(model.weight)
    tokens = torch.full((2, 3), 1.0 + gm.rank())
    mask = torch.tensor([True, gm.rank() == 0])  # two tokens count on rank 0, one on rank 1
    losses = model(tokens).sum(1)
    loss = gm.objective(losses[mask].mean(), weights=mask.sum(), ddp=True)  # in training: ddp=model
    loss.backward()
    averaged = gm.all_reduce(model.weight.grad, dst=gm.R, op="mean")  # what the wrapper does
    return loss.item(), averaged.tolist()

print(gm.launch(on_each_rank, 2, backend="threads")[0])
```

```text
(4.0, [[1.3333333730697632, 1.3333333730697632, 1.3333333730697632]])
```

* `weights` is over how many samples or tokens this rank's loss is. The mean is over all of them, not the mean of
  the ranks' means; a rank without any has 0.
* `ddp` is the module in its wrapper (DDP, FSDP1 or `fully_shard`), which tells by what it divides; or True, or a
  number.
* With gradient accumulation say `steps=k`; with weights `total=`, what they add up to over all ranks and
  micro-batches. [`gm.no_sync()`](no_sync.md) takes the sums over the ranks once for all of them.
* On a mesh with several axes, each axis has its turn: with tensor parallelism beside data parallelism
  `gm.objective(gm.objective(loss, "tp", loss_type=gm.I), "dp", ddp=model)`. With context parallelism the axis is
  the one over which the wrapper averages, which has both data and context ranks: whichever of them holds a token,
  it counts once.
* `loss_type` says what the ranks' losses are: `gm.V`, each has its own; `gm.R` or `gm.I`, all have the same one.

## The trap: a loss that was summed to be printed

`loss = gm.all_reduce(loss, dst=gm.I, op="mean")` gives the number to print. If backward starts from it, it is part
of the graph, and its backward is the identity: each rank's parameters get the gradient of their own loss over W. A
wrapper that averages divides by W once more, and training goes on with a learning rate that is W times too small.
So the value that `gm.objective` returns is the loss of all ranks, and what is in the graph is not.
[`gm.check("full")`](conventions.md) warns where a backward pass starts from such a sum.

## Held against one process

Written by `python -m tools.objectives --write docs/objective.md`. Four ranks have tokens of their own, a mask says
which of them count, and parameters stand before and behind a gather over the context ranks, whose result every rank
uses. A cell is the largest deviation of any parameter's gradient from that of one process which has all tokens, in
float64, relative to the largest entry.

{table}
"""


def table() -> str:
    """The table, in Markdown."""
    lines = [
        f"torch {torch.__version__.split('+')[0]}, {platform.machine()}, {os.cpu_count()} cores, "
        f"{RANKS} ranks on shm\n",
        f"| mesh | micro-batches | mask | {' | '.join(WRAPPERS)} |",
        f"|---|---|---|{'---|' * len(WRAPPERS)}",
    ]
    with gm.Ranks(RANKS, backend="shm") as ranks:
        for mesh, sizes in MESHES.items():
            for steps in (1, 3):
                for name, mask in MASKS.items():
                    cells = [
                        max(found for found, _ in ranks.run(on_rank, wrapper, sizes, mask, steps))
                        for wrapper in WRAPPERS
                    ]
                    shown = " | ".join(f"{cell:.0e}" for cell in cells)
                    lines.append(f"| {mesh} | {steps} | {name} | {shown} |")
        for name, mask in tensor_parallel_masks().items():
            cell = f"{max(ranks.run(tensor_parallel, mask)):.0e}"
            lines.append(f"| data 2 x tensor 2 | 1 | {name} | | {cell} | | |")
    return "\n".join(lines)


@click.command(help="Hold the gradients of gm.objective against one process.")
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="The page to write.")
def main(write: Path | None) -> None:
    """Print the table."""
    text = table()
    print(text)
    if write is not None:
        write.write_text(PAGE.format(table=text))


if __name__ == "__main__":
    main()
