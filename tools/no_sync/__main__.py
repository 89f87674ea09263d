"""The command that prints what is sent with and without `gm.no_sync`, and writes its page."""

from __future__ import annotations

from pathlib import Path

import click

from tools.no_sync import MICRO_BATCHES, MODELS, RANKS, counted, deviation

PAGE = """# Accumulating gradients without a sum in every micro-batch

A step of the optimizer is often made of several micro-batches. Backward of each would sum over the ranks what it owes
to the parameters, and only the total counts. `gm.no_sync()` is DDP's word for the same: inside of the block these sums
are put off, and the backward of the first micro-batch outside takes them, for all micro-batches at once.

```python
import contextlib
import torch
import gradmesh as gm

def on_each_rank():
    w = torch.ones(2, requires_grad=True)
    optimizer, seen = torch.optim.SGD([w], lr=0.1), []
    for micro_batch in range(3):
        last = micro_batch == 2
        with contextlib.nullcontext() if last else gm.no_sync():
            y = gm.replicate(w) * (micro_batch + gm.rank())
            loss = gm.objective(y.sum(), steps=3)
        loss.backward()
        seen.append(None if w.grad is None else w.grad.tolist())
    optimizer.step()
    return seen, w.tolist()

print(gm.launch(on_each_rank, 2, backend="threads")[0])
```

```text
([None, None, [1.5, 1.5]], [0.8500000238418579, 0.8500000238418579])
```

## What is put off

* What counts is where the **forward** ran, as in DDP. Backward may run inside of the block or behind it.
* Put off is the backward of a verb that is applied to a **leaf** that requires grad, where that backward sends:
  `replicate`, `broadcast`, `all_gather` of a parameter's shard, and every other linear verb. The leaf's `.grad` stays
  as it is meanwhile.
* The sums of an axis are taken at the end of the first backward pass that comes through a call on one of the same
  leaves whose forward ran outside. `with gm.no_sync() as owed:` gives a handle: `owed.sync()` takes them at any other
  time, on every rank, for a micro-batch that shows too late to have been the last. `len(owed)` says for how many pairs
  of a leaf and a verb something is put off.
* They travel together. The ranks first tell each other which of the sums they have something of, four bytes for each,
  and compare which there are: ranks that put off different ones get a `MismatchError`. Then all sums and means of one
  kind, axis, dtype and device are one message, and so are all reduce-scatters with even parts, and all with uneven
  ones. The backward of `shard`, `reduce_scatter`, `all_to_all`, `shift`, `permute`, `halo_exchange`, `gather` and
  `scatter` of a leaf is a message for each leaf.
* A leaf that no rank has a gradient for keeps `.grad` as it is, also inside `gm.ordered()`.

Everything else is summed in each micro-batch as ever, which is right and sends more:

* operands that are no leaves: `gm.replicate(w * 2)`, or one call for a list of parameters, whose operand is their
  concatenation;
* calls with `async_op=True`, whose backward is overlapped instead, and those in `gm.coalesce`;
* gradients that are handed out, by `torch.autograd.grad` and `gm.grad`, and backward with `create_graph=True`;
* `torch.func` transforms and compiled programs (enter the block around the compiled function; inside it is refused);
* leaves with hooks: each pass calls them, and they see the sum of that pass;
* calls inside the forward of DDP, which takes `.grad` as soon as its own hooks are called;
* a call whose operand is a leaf on some ranks alone, where calls are compared (on CPU); elsewhere `broadcast` and
  `scatter`, of which the other ranks may have no leaf.

A reentrant checkpoint runs its collectives in backward, and they count as run there. One that is not reentrant keeps to
its first pass. Parameters that `fully_shard` gathers and frees are refused: for these there is its own
`set_requires_gradient_sync`.

## Steps

A step of an optimizer of `torch.optim` on a parameter that something is owed to is an `OrderError`, which names the
parameter's shape and the line of the call. What is put off is a ledger of its own: `zero_grad()` clears `.grad` and
leaves it alone. To skip a step, call `owed.clear()` too.

Until the sums are taken, each leaf has this rank's gradient of the call's result in memory. For `all_gather` this is as
large as what was gathered, as in FSDP's `no_sync`. While they are taken, what goes in one message is copied into a row.

The block is its thread's own, and nested blocks are one. Each thread of a rank that trains has its own ledger.

## What it saves

Written by `python -m tools.no_sync --write docs/no_sync.md`, for layers of 64 x 64 in float64 on {ranks} simulated
ranks. Messages and bytes are those of one rank going backward in one optimizer step. A deviation is the largest of any
gradient from that without the block, relative to its largest entry; of the layers of all kinds one has a gradient that
travels in float32.

{table}
"""


def table() -> str:
    """What is sent, in Markdown."""
    lines = [
        "| parameters | micro-batches | messages without | with | bytes without | with | with / without | deviation |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        for k in MICRO_BATCHES:
            (many, much, plain), (few, little, ours) = counted(model, k, False), counted(model, k, True)
            lines.append(
                f"| {model} | {k} | {many} | {few} | {much:,} | {little:,} | {little / much:.4f} | "
                f"{deviation(ours, plain):.0e} |"
            )
    return "\n".join(lines)


@click.command(help="Count what accumulation sends with and without gm.no_sync.")
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="The page to write.")
def main(write: Path | None) -> None:
    """Print the table."""
    text = table()
    print(text)
    if write is not None:
        write.write_text(PAGE.format(table=text, ranks=RANKS))


if __name__ == "__main__":
    main()
