"""`gradcheck`: a program's gradients on every rank, against finite differences of the objective of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gradmesh.errors import ArgumentError, GradcheckError, RankError, message
from gradmesh.launch import Ranks
from gradmesh.verify.gradients.diagnosis import diagnosed
from gradmesh.verify.gradients.digits import refined, widest
from gradmesh.verify.gradients.findings import NONE_FITS, TOO_FEW_DIGITS, Diagnosis
from gradmesh.verify.gradients.judge import entries
from gradmesh.verify.gradients.measure import Measured, Options, exchanged, measure
from gradmesh.verify.gradients.program import Objective
from gradmesh.verify.gradients.report import GradcheckReport

__all__ = ["gradcheck"]

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
    """Check the gradients that a program of several ranks leaves on each, against finite differences.

    `fn` runs on every rank with that rank's inputs and returns that rank's loss. The losses make one objective; every
    leaf is moved a little, on one rank or, where it is the same on all, on all at once, and what the objective does is
    held against the gradients. What the gradient of a leaf has to be follows from its type:

    ====  =======================================================================================
    V     each rank's: the derivative of the objective by that rank's value
    R     the sum of the ranks' gradients: the derivative by the one value
    I     each rank's: the derivative by the one value
    P     each rank's: the derivative by that rank's part
    ====  =======================================================================================

    A tensor is V and a module's parameters are R, or I inside of DistributedDataParallel, unless `Input` says
    otherwise. `fn` may call torch.distributed, gradmesh, modules, and anything else that gives the same losses when it
    is called again.

    Args:
        fn: returns one real float64 element that requires grad.
        inputs: a function of the rank that returns the rank's inputs, a tuple; or a list of these, one for each rank.
            Sizes may differ from rank to rank. Tensors are converted to double precision; modules have to be in it,
            and each rank needs its own: make it in this function, or `copy.deepcopy` it there.
        world_size: how many ranks to launch. None: this is called on every rank of a world that is there.
        objective: "sum": the sum of the ranks' losses. "replicated": the loss, which is the same on every rank and
            counts once; whether it is the same is checked. "mean": the mean of the losses, as DDP and FSDP have it.
        order: 2 checks the gradients of the gradients too.
        forward: check forward mode too.
        backend: as for `gradmesh.launch`.
        full: move each element by itself, in place of all along random directions.
        ordered: run forward and backward inside `gradmesh.ordered()`. Then a rank's loss may depend on nothing,
            or be None, which counts as 0.
        directions: how many random directions each leaf is moved along. An error of the size e of a gradient passes one
            of them with a probability of about tolerance / e.
        eps: how far.
        atol: what a derivative may be off by, beside 20 roundings of the losses divided by eps, which are added. Where
            these hide more than a hundredth of a gradient it is measured with larger steps, up to 1e-3, and where they
            still do it counts as not right: the loss has too few digits to tell.
        rtol: the same, relative to the size of the ranks' terms of it.
        seed: of the directions.
        diagnose: look for the reason of a failure, which takes a few more runs.
        raise_exception: raise if gradients are wrong.
        timeout: seconds for each run on the ranks; None: no limit.

    Returns:
        The report, the same on every rank; true if all gradients are right.

    Raises:
        ArgumentError: the inputs or the loss are not usable; on every rank before the backward is run.
        DTypeError: a parameter or the loss is not of double precision.
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
    begun = time.perf_counter()
    given = inputs if callable(inputs) else _Listed(inputs)
    if world_size is None:
        report = _on_ranks(lambda job, *args: exchanged(job(*args)), fn, given, options, diagnose)
    else:
        with Ranks(world_size, backend, timeout, prefix=False) as ranks:
            report = _on_ranks(ranks.run, fn, given, options, diagnose)
    report.seconds = time.perf_counter() - begun
    if raise_exception and not report.ok:
        raise GradcheckError(message(str(report)), report)
    return report


class _Listed:
    """Inputs that were given as a list, one for each rank."""

    def __init__(self, each: Sequence[object]) -> None:
        self.each = each

    def __call__(self, rank: int) -> object:
        return self.each[rank]


def _on_ranks(
    run: Callable[..., list[Any]],
    fn: Callable[..., Tensor],
    inputs: Callable[[int], object],
    options: Options,
    diagnose: bool,
) -> GradcheckReport:
    """Measure on every rank, compare, and look for the reason if something is wrong."""
    found: list[Measured] = run(measure, fn, inputs, options)
    for rank in found:
        if rank.problem is not None:
            raise rank.problem

    def again(wider: Options) -> list[Measured]:
        return run(measure, fn, inputs, wider)

    every = entries(found, options)
    hidden = any(entry.blurred and entry.ok for entry in every)
    every = refined(every, again, options)
    report = GradcheckReport(len(found), options.objective, [rank.loss for rank in found], every)
    if not report.ok and diagnose:
        report.diagnosis = _reason(report, run, fn, inputs, widest(options) if hidden else options)
    return report


def _reason(
    report: GradcheckReport,
    run: Callable[..., list[Any]],
    fn: Callable[..., Tensor],
    inputs: Callable[[int], object],
    options: Options,
) -> Diagnosis:
    modes = {entry.mode for entry in report.failed if not entry.unclear}
    if not modes:
        return Diagnosis(
            TOO_FEW_DIGITS,
            "the rounding of the losses is as large as what a gradient makes of them; leave constants out of the loss, "
            "or make its terms smaller",
        )
    if "same on every rank" in modes:
        return Diagnosis(
            "loss not replicated",
            "the objective counts one loss, and the ranks have several; pass objective='sum', or all_reduce the loss",
        )
    if "gradient" not in modes:
        what = " and ".join(sorted(modes))
        return Diagnosis(NONE_FITS, f"the gradients are right; only the {what} are not")
    try:
        return diagnosed(run, fn, inputs, options)
    except RankError as error:
        return Diagnosis(NONE_FITS, f"looking for the reason failed: {str(error).splitlines()[0]}")


def _refuse_wrong(options: Options, inputs: Inputs, world_size: int | None) -> None:
    """Refuse arguments that no rank could use."""
    ranks = world_size if world_size is not None or not dist.is_initialized() else dist.get_world_size()
    wrong: tuple[str, str, object] | None = None
    if options.objective not in ("sum", "mean", "replicated"):
        wrong = "objective", "'sum', 'mean' or 'replicated'", options.objective
    elif options.order not in (1, 2):
        wrong = "order", "1 or 2", options.order
    elif options.order == 2 and options.objective == "mean":
        wrong = (
            "order",
            "1 where the objective is 'mean', since wrappers that average have no second order",
            2,
        )
    elif not options.eps > 0:
        wrong = "eps", "a positive number", options.eps
    elif options.directions < 1:
        wrong = "directions", "1 or more", options.directions
    elif ranks is None:
        wrong = "world_size", "a number of ranks, or ranks that are there", None
    elif not callable(inputs) and (not isinstance(inputs, list | tuple) or len(inputs) != ranks):
        wrong = "inputs", f"a function of the rank, or a list of {ranks}, one for each rank", _shown(inputs)
    if wrong is not None:
        name, expected, got = wrong
        raise ArgumentError(
            message(
                f"{name} is not usable",
                op="verify.gradcheck",
                expected=expected,
                got=f"{name}={got!r}",
                remedy="see the documentation of gradmesh.verify.gradcheck",
            )
        )


def _shown(inputs: object) -> str:
    return f"{len(inputs)} of them" if isinstance(inputs, list | tuple) else type(inputs).__name__
