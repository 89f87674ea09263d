"""Domain decomposition: a Fourier neural operator for Burgers' equation, compared with one process step by step.

    python examples/fno_burgers.py                                       # 4 thread ranks
    torchrun --nproc-per-node 4 examples/fno_burgers.py                  # 4 processes

The solver, the operator and the training loop are in `gradmesh_demos.fno`. The parallel operator uses
`gm.nn.HaloConv1d` and `gm.nn.SpectralConv`, and sums the error over the ranks.
"""

from __future__ import annotations

import argparse
import os

import torch
from gradmesh_demos.fno import Job, data_of, dense_operator, train

import gradmesh as gm

Curve = list[tuple[float, float]]
"""The loss of each step, and the held-out error after its epoch."""


def follow(job: Job) -> tuple[Curve, Curve, float]:
    """On rank 0: the curves of the ranks and of one process, and the largest difference of a parameter."""
    torch.set_num_threads(1)
    data = data_of(job)
    start = dense_operator(job).state_dict()
    parallel = list(train(job, *data, start, parts=True))
    if gm.rank():
        return [], [], 0.0
    alone = list(train(job, *data, start, parts=False))
    pairs = zip(parallel[-1].operator.parameters(), alone[-1].operator.parameters(), strict=True)
    apart = max(float((a - b).detach().abs().max()) for a, b in pairs)
    curves = [
        [(loss, step.held_out) for step in steps for loss in step.losses] for steps in (parallel, alone)
    ]
    return curves[0], curves[1], apart


def report(job: Job, ranks: str, curve: Curve, right: Curve, apart: float) -> None:
    """Print some losses, and the largest differences."""
    print(f"{ranks}, {job.points} grid points, {job.samples} training solutions")
    for step in sorted({0, len(curve) // 2, len(curve) - 1}):
        (loss, held), (other, _) = curve[step], right[step]
        print(f"step {step:>3}  loss {loss:.6f}  one process {other:.6f}  held out {held:.1%}")
    far = max(abs(a[0] - b[0]) for a, b in zip(curve, right, strict=True))
    print(f"loss {curve[-1][0]:.6f} in {len(curve)} steps")
    print(f"losses are at most {far:.1e} apart, parameters {apart:.1e}")


def main() -> None:
    """Train, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="number of local ranks, without torchrun")
    parser.add_argument("--backend", help="threads (default without torchrun), shm, gloo or nccl")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument(
        "--points", type=int, default=126, help="grid points; need not be divisible by the ranks"
    )
    args = parser.parse_args()
    job = Job(ranks=args.ranks, epochs=args.epochs, samples=args.samples, points=args.points)
    if "RANK" in os.environ:
        gm.init(args.backend)
        found = follow(job)
        if gm.rank() == 0:
            report(job, f"{gm.world_size()} processes", *found)
        return
    backend = args.backend or "threads"
    report(
        job, f"{job.ranks} ranks on {backend}", *gm.launch(follow, job.ranks, backend=backend, args=(job,))[0]
    )


if __name__ == "__main__":
    main()
