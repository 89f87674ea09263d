"""`gradcheck`: compares gradients on every rank with finite differences of the objective of all ranks."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from gradmesh.errors import GradcheckError, RankError, message
from gradmesh.launch import Ranks
from gradmesh.verify.gradients.diagnosis import diagnosed
from gradmesh.verify.gradients.inputs import objective_check, raise_first, refuse_invalid
from gradmesh.verify.gradients.program import Measured, Objective, Options, Run, exchanged, measure
from gradmesh.verify.gradients.report import (
    NONE_FITS,
    TOO_FEW_DIGITS,
    Diagnosis,
    GradcheckReport,
    entries,
    refined,
    widest,
)

Inputs = Callable[[int], object] | Sequence[object]


def gradcheck(
    fn: Callable[..., Tensor],
    inputs: Inputs,
    *,
    world_size: int | None = None,
    objective: Objective = "sum",
    order: int = 1,
    forward: bool = False,
    backend: str = "threads",
    full: bool = False,
    ordered: bool = False,
    directions: int = 2,
    eps: float = 1e-6,
    atol: float = 1e-8,
    rtol: float = 1e-6,
    seed: int = 0,
    diagnose: bool = True,
    raise_exception: bool = True,
    timeout: float | None = 60.0,
) -> GradcheckReport:
    """Compare the gradients of a multi-rank program on each rank with finite differences.

    `fn` runs on every rank with that rank's inputs and returns that rank's loss. The losses are combined into one
    objective. Each leaf is perturbed, on one rank or, if it is replicated, on all ranks at once, and the change of the
    objective is compared with the gradients. The expected gradient of a leaf follows from its type:

    ====  =======================================================================================
    V     on each rank: the derivative of the objective with respect to that rank's value
    R     summed over ranks: the derivative with respect to the replicated value
    I     on each rank: the derivative with respect to the replicated value
    P     on each rank: the derivative with respect to that rank's summand
    ====  =======================================================================================

    By default tensors are V, and parameters of a module are R, or I inside of DistributedDataParallel; override this
    with `Input`. `fn` may call torch.distributed, gradmesh, modules and any other code, as long as repeated calls
    return the same losses.

    Args:
        fn: returns one real float64 element that requires grad.
        inputs: a function of the rank that returns the rank's inputs as a tuple; or a list of tuples, one per rank.
            Sizes may differ between ranks. Tensors are converted to double precision. Modules must already be in double
            precision, and each rank needs a separate one: create or `copy.deepcopy` it in this function.
        world_size: the number of ranks to launch. None: call this on every rank of an initialized world.
        objective: "sum": the sum of the ranks' losses. "replicated": the loss, which must be the same on every rank
            (this is checked) and counts once. "mean": the mean of the losses, as in DDP and FSDP.
        order: 2: also check second-order gradients.
        forward: also check forward-mode AD.
        backend: as for `gradmesh.launch`.
        full: perturb each element separately instead of all elements along random directions.
        ordered: run forward and backward inside `gradmesh.ordered()`. A rank's loss may then be independent of the
            inputs, or None, which counts as 0.
        directions: the number of random directions for each leaf. The probability that a gradient error of size e goes
            unnoticed in one direction is about tolerance / e.
        eps: the step size.
        atol: the absolute tolerance of a derivative, in addition to 20 rounding errors of the losses divided by eps. If
            the latter hide more than 1% of a gradient, it is measured again with larger steps, up to 1e-3; if they
            still do, the comparison fails as undecidable, because the loss has too few digits.
        rtol: the tolerance relative to the size of the ranks' terms of the derivative.
        seed: the seed of the directions.
        diagnose: search for the cause of a failure; needs a few more runs.
        raise_exception: raise if gradients are wrong.
        timeout: seconds for each run on the ranks; None: no limit.

    Returns:
        The report, the same on every rank; true if all gradients are correct.

    Raises:
        ArgumentError: invalid inputs or an invalid loss; raised on every rank before backward.
        DTypeError: a parameter or the loss is not in double precision.
        GradcheckError: gradients are wrong.
        RankError: a rank failed.

    Example:
        >>> def loss(x, w):
        ...     rows = gm.all_gather(x)
        ...     return (1 + gm.rank()) * (w * rows**2).sum()
        >>> def inputs(rank):
        ...     return torch.arange(3.0) + rank, gm.verify.Input(torch.tensor(2.0), gm.R)
        >>> print(gm.verify.gradcheck(loss, inputs, world_size=2))
        gradcheck on 2 ranks, objective 'sum': all 3 gradients are right
    """
    options = Options(objective, order, forward, full, eps, directions, seed, ordered, atol, rtol)
    _refuse_wrong(options, inputs, world_size)
    start = time.perf_counter()
    given = inputs if callable(inputs) else functools.partial(operator.getitem, inputs)
    if world_size is None:
        report = _on_ranks(lambda job, *args: exchanged(job(fn, given, *args)), options, diagnose)
    else:
        with Ranks(world_size, backend, timeout, prefix=False) as ranks:
            report = _on_ranks(lambda job, *args: ranks.run(job, fn, given, *args), options, diagnose)
    report.seconds = time.perf_counter() - start
    if raise_exception and not report.ok:
        raise GradcheckError(message(str(report)), report)
    return report


def _on_ranks(run: Run, options: Options, diagnose: bool) -> GradcheckReport:
    """Measure on every rank, compare, and diagnose a failure."""
    found: list[Measured] = run(measure, options)
    raise_first([rank.problem for rank in found])
    every = entries(found, options)
    hidden = any(entry.blurred and entry.ok for entry in every)
    every = refined(every, lambda wider: run(measure, wider), options)
    report = GradcheckReport(len(found), options.objective, [rank.loss for rank in found], every)
    if not report.ok and diagnose:
        report.diagnosis = _reason(report, run, widest(options) if hidden else options)
    return report


def _reason(report: GradcheckReport, run: Run, options: Options) -> Diagnosis:
    modes = {entry.mode for entry in report.failed if not entry.unclear}
    if not modes:
        return Diagnosis(
            TOO_FEW_DIGITS,
            "rounding errors of the losses are as large as their change with the inputs; remove constants from the "
            "loss, or scale its terms down",
        )
    if "same on every rank" in modes:
        return Diagnosis(
            "loss not replicated",
            "objective='replicated' requires the same loss on every rank; pass objective='sum', or all_reduce the loss",
        )
    if "gradient" not in modes:
        what = " and ".join(sorted(modes))
        return Diagnosis(NONE_FITS, f"the first-order gradients are correct; the {what} are wrong")
    try:
        return diagnosed(run, options)
    except RankError as error:
        return Diagnosis(NONE_FITS, f"the diagnosis failed: {str(error).splitlines()[0]}")


def _refuse_wrong(options: Options, inputs: Inputs, world_size: int | None) -> None:
    """Raise if an argument is invalid."""
    ranks = world_size if world_size is not None or not dist.is_initialized() else dist.get_world_size()
    refuse_invalid(
        "verify.gradcheck",
        objective_check(options.objective),
        (
            options.order in (1, 2),
            "order",
            options.order,
            "1 or 2",
            "pass order=1, or order=2 to check second-order gradients too",
        ),
        (
            options.order == 1 or options.objective != "mean",
            "order",
            options.order,
            "1 with objective='mean', since wrappers that average gradients do not support double backward",
            "pass order=1, or check the unwrapped module with objective='sum'",
        ),
        (options.eps > 0, "eps", options.eps, "a positive number", "pass e.g. eps=1e-6"),
        (options.directions >= 1, "directions", options.directions, "an int >= 1", "pass e.g. directions=2"),
        (
            ranks is not None,
            "world_size",
            None,
            "a number of ranks, or an initialized world",
            "pass e.g. world_size=2, or call gm.init() first on every rank",
        ),
        (
            callable(inputs) or (isinstance(inputs, list | tuple) and len(inputs) == ranks),
            "inputs",
            f"{len(inputs)} items" if isinstance(inputs, list | tuple) else type(inputs).__name__,
            f"a function of the rank, or a list of {ranks} items, one per rank",
            "pass e.g. inputs=lambda rank: (torch.randn(3),)",
        ),
    )
