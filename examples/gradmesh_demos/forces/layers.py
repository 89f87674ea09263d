"""The parts of an equivariant network of messages: scalars and vectors of each atom, by e3nn (Geiger, Smidt, 2022).

A message is the tensor product of the source's features and the spherical harmonics of the edge, with weights by its
length and its two elements (Batzner et al., E(3)-equivariant graph neural networks, 2022). It ends smoothly at the
cutoff, so that forces and their slopes do not jump there.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from e3nn import o3, set_optimization_defaults
from e3nn.nn import Gate
from e3nn.util.codegen import CodeGenMixin
from torch import Tensor, nn

from gradmesh.errors import DTypeError, message
from gradmesh.nn.graph import GraphPlan
from gradmesh_demos.forces.structures import ELEMENTS
from gradmesh_demos.runner import seeded

# As by default from torch 2.10 on: a function that TorchScript compiled is neither copied nor sent to another process.
set_optimization_defaults(jit_mode="eager")

CUTOFF = 4.5
WAVES = 8
NEIGHBOURS = 30.0
"""About how many an atom has; messages are divided by the root of it."""

Model = TypeVar("Model", bound=nn.Module)

Edge = tuple[Tensor, Tensor, Tensor]
"""Spherical harmonics, radial waves, and the pair of elements, of each edge."""


class Layer(nn.Module):
    """Messages along the edges, and what becomes of an atom's features by their sum."""

    def __init__(self, features: o3.Irreps, channels: int, harmonics: o3.Irreps) -> None:
        super().__init__()
        scalars, vectors = o3.Irreps(f"{channels}x0e"), o3.Irreps(f"{channels}x1o")
        self.gate = Gate(scalars, [torch.nn.functional.silu], scalars, [torch.sigmoid], vectors)
        paths, kept = list[Any](), list[Any]()
        for one, (number, left) in enumerate(features):
            for other, (_, right) in enumerate(harmonics):
                for each in left * right:
                    if each in features or each in vectors:
                        paths.append((one, other, len(kept), "uvu", True))
                        kept.append((number, each))
        self.product = o3.TensorProduct(
            features, harmonics, o3.Irreps(kept), paths, internal_weights=False, shared_weights=False
        )
        self.pairs = nn.Parameter(torch.randn(len(ELEMENTS) ** 2, 2 * WAVES))
        self.radial = nn.Sequential(nn.Linear(WAVES, 2 * WAVES, bias=False), nn.SiLU())
        self.weights = nn.Linear(2 * WAVES, self.product.weight_numel, bias=False)
        self.mixed = _linear(o3.Irreps(kept).simplify(), self.gate.irreps_in)
        self.kept = _linear(features, self.gate.irreps_in)
        self.mixing = nn.Parameter(torch.randn(self.mixed.weight_numel))
        self.keeping = nn.Parameter(torch.randn(self.kept.weight_numel))

    def messages(self, rows: Tensor, edge: Edge) -> Tensor:
        """A message for each edge.

        Args:
            rows: the features of the edges' sources.
            edge: what the edges are.
        """
        harmonics, waves, pair = edge
        # Every wave is zero at the cutoff, with its first derivatives, and so is then what is made without a bias.
        weights = self.weights(self.radial(waves) * self.pairs[pair])
        sent: Tensor = self.product(rows, harmonics, weights)
        return sent

    def update(self, features: Tensor, sums: Tensor) -> Tensor:
        """The next features of the atoms."""
        made: Tensor = self.gate(
            self.mixed(sums / NEIGHBOURS**0.5, self.mixing) + self.kept(features, self.keeping)
        )
        return made


def _linear(given: o3.Irreps, made: o3.Irreps) -> o3.Linear:
    return o3.Linear(given, made, internal_weights=False, shared_weights=True)


class Parts(nn.Module):
    """All parts of the potential, with weights; what calls them in turn is `single.Potential`, or `parallel.Potential`.

    Args:
        channels: how many scalars, and how many vectors, each atom has.
        seed: of the weights.
    """

    layers: Any
    alone: Tensor

    def __init__(self, channels: int, seed: int = 0) -> None:
        super().__init__()
        with seeded(seed):
            before = torch.get_default_dtype()
            # Of another dtype, e3nn's coefficients would be rounded to it first.
            torch.set_default_dtype(torch.float64)
            try:
                self._make(channels)
            finally:
                torch.set_default_dtype(before)

    def _make(self, channels: int) -> None:
        harmonics = o3.Irreps("0e+1o")
        scalars = o3.Irreps(f"{channels}x0e")
        self.channels = channels
        self.harmonics = o3.SphericalHarmonics(harmonics, normalize=True, normalization="component")
        # No nn.Embedding: its second derivative is an error on a rank that has no rows.
        self.embed = nn.Parameter(torch.randn(len(ELEMENTS), channels))
        first = Layer(scalars, channels, harmonics)
        self.layers = nn.ModuleList([first, Layer(first.gate.irreps_out, channels, harmonics)])
        self.readout = nn.Sequential(
            nn.Linear(channels, 2 * channels), nn.SiLU(), nn.Linear(2 * channels, 1, bias=False)
        )
        self.register_buffer("alone", torch.zeros(len(ELEMENTS)))

    def edge(self, apart: Tensor, pair: Tensor) -> Edge:
        """What messages need to know of the edges.

        Args:
            apart: from the targets to the sources.
            pair: the elements of both, shape (2, edges).

        Raises:
            DTypeError: the weights are of another dtype than the positions.
        """
        if apart.dtype != self.embed.dtype:
            raise DTypeError(
                message(
                    "the potential's dtype differs from the positions'",
                    op="demo.forces",
                    expected=f"{apart.dtype}",
                    got=f"{self.embed.dtype}",
                    remedy="convert the model: model.to(positions.dtype)",
                )
            )
        far = apart.norm(dim=1, keepdim=True)
        part = (far / CUTOFF).clamp(max=1)
        number = torch.arange(1, WAVES + 1, dtype=far.dtype)
        waves = torch.sin(torch.pi * number * part) / far * (1 - part**3) ** 3
        return self.harmonics(apart), waves, pair[0] * len(ELEMENTS) + pair[1]

    def atomic(self, features: Tensor, kinds: Tensor) -> Tensor:
        """The energy of each atom: what its scalars say, and that of its element."""
        said: Tensor = self.readout(features[:, : self.channels]).squeeze(1)
        return said + self.alone[kinds]


def copied(model: Model) -> Model:
    """The model with parameters of its own, for a rank to train: ranks that are threads are all handed the same one.

    Copying e3nn's modules would trace them again, which threads cannot do at once; none of them has a parameter.
    """
    kept = {id(part): part for part in model.modules() if isinstance(part, CodeGenMixin)}
    return copy.deepcopy(model, kept)


class OncePlan(GraphPlan):
    """Its energies and forces are right. A loss on forces has a wrong gradient, and nothing says so.

    Its backward sends rows back as it should, by calls of which autograd does not know.
    """

    def exchange(self, x: Tensor, **options: Any) -> Any:
        """As `GraphPlan.exchange`; the gradient of its gradient is taken for zero."""
        del options
        return _Once.apply(x, super().exchange)  # type: ignore[no-untyped-call]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Any) -> Tensor:
        ctx.exchange, ctx.like = exchange, x.detach()
        sent: Tensor = exchange(x)
        return sent

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            x = ctx.like.clone().requires_grad_()
            (back,) = torch.autograd.grad(ctx.exchange(x), x, gradient.detach())
        return back, None
