"""A separate default random generator for each thread rank.

torch has one default CPU generator per process, in C++, so that ranks would draw from each other's sequence. So the CPU
kernels that draw random numbers are wrapped: without a generator argument they use that of the rank on a rank's thread,
and the process's generator on any other thread. The functions of `torch.random` (`manual_seed`, `get_rng_state`, ...)
use the same generators through a replacement of `torch.random.default_generator`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from gradmesh._torch.levels import of_thread
from gradmesh._torch.names import find, there

__all__ = ["DRAWING", "generator_per_rank"]

_SHARED = "thread ranks share torch's default random generator"
_get_kernel = find("torch.library.get_kernel", without=_SHARED)
_has_default = there("torch.random.default_generator", without=_SHARED)

DRAWING = (
    "_sample_dirichlet",
    "_standard_gamma",
    "bernoulli.out",
    "bernoulli_.Tensor",
    "bernoulli_.float",
    "binomial",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "multinomial",
    "multinomial.out",
    "normal.Tensor_Tensor",
    "normal.Tensor_Tensor_out",
    "normal.Tensor_float",
    "normal.Tensor_float_out",
    "normal.float_Tensor",
    "normal.float_Tensor_out",
    "normal_",
    "poisson",
    "random_",
    "random_.from",
    "random_.to",
    "randperm.generator_out",
    "rrelu_with_noise",
    "rrelu_with_noise.out",
    "rrelu_with_noise_",
    "uniform_",
)
"""The operators whose CPU kernels draw from a generator; all other random operators call these."""

_MARK = 0x6772_6164_6D65_7368
"""The seed of the replacement generator, which is never drawn from, by which kernels recognize it."""


class _DefaultGenerator(torch.Generator):
    """Replaces `torch.random.default_generator`: delegates to the generator of the calling rank, or the process's."""

    process: torch.Generator

    def of_thread(self) -> torch.Generator:
        """The generator of the calling thread."""
        found: torch.Generator = getattr(of_thread, "generator", self.process)
        return found

    def manual_seed(self, seed: int) -> torch.Generator:
        return self.of_thread().manual_seed(seed)

    def seed(self) -> int:
        return self.of_thread().seed()

    def initial_seed(self) -> int:
        return self.of_thread().initial_seed()

    def get_state(self) -> torch.Tensor:
        return self.of_thread().get_state()

    def set_state(self, state: torch.Tensor) -> torch.Generator:
        return self.of_thread().set_state(state)


@functools.cache
def generator_per_rank() -> None:
    """Wrap the kernels, once per process and permanently, since unwrapping would race with drawing threads."""
    if _get_kernel is None or not _has_default:
        return
    default = _DefaultGenerator()
    torch.Generator.manual_seed(default, _MARK)
    default.process = torch.random.default_generator  # type: ignore[attr-defined]
    torch.random.default_generator = default  # type: ignore[attr-defined]
    generator_per_rank.library = library = torch.library.Library("aten", "IMPL")  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning about a replaced kernel
        for name in DRAWING:
            with contextlib.suppress(RuntimeError, AttributeError):  # an operator that this torch lacks
                original = _get_kernel(f"aten::{name}", "CPU")
                library.impl(name, _drawing(original, default), "CPU", with_keyset=True)


def _drawing(original: Any, default: _DefaultGenerator) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Any:
        if generator is None:
            generator = getattr(of_thread, "generator", None)
        elif generator.initial_seed() == _MARK:  # a copy of the replacement
            generator = default.of_thread()
        return original.call_boxed(keyset, *args, generator=generator, **kwargs)

    return kernel
