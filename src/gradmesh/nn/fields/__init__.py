"""Domain decomposition: operators on grids (fields) that are sharded over ranks along spatial dims.

* `HaloConv1d`, `HaloConvTranspose1d` and those of two and three dims; `max_pool`, `avg_pool`, `interpolate`.
* `fftn`, `ifftn`, `rfftn`, `irfftn`, and the `SpectralConv` of Fourier neural operators.
* `spectral_norm`, `bce_with_logits`, `inv_ex`, `spdiags`, `narrow_copy`: operators that need other ranks' data when
  their input is sharded.

Layers replicate their parameters: the gradient of a parameter is the dense layer's, complete on every rank. With
`replicated=False` it is this rank's contribution, for a wrapper that sums over the same ranks.
"""

from gradmesh.nn.fields.fourier import SpectralConv, fftn, ifftn, irfftn, rfftn
from gradmesh.nn.fields.halo import (
    HaloAvgPool,
    HaloConv1d,
    HaloConv2d,
    HaloConv3d,
    HaloConvTranspose1d,
    HaloConvTranspose2d,
    HaloConvTranspose3d,
    HaloMaxPool,
    avg_pool,
    interpolate,
    max_pool,
)
from gradmesh.nn.fields.operators import (
    BCEWithLogitsLoss,
    Inverses,
    SpectralNorm,
    bce_with_logits,
    inv_ex,
    narrow_copy,
    narrowed_sizes,
    spdiags,
    spectral_norm,
)

__all__ = [
    "BCEWithLogitsLoss",
    "HaloAvgPool",
    "HaloConv1d",
    "HaloConv2d",
    "HaloConv3d",
    "HaloConvTranspose1d",
    "HaloConvTranspose2d",
    "HaloConvTranspose3d",
    "HaloMaxPool",
    "Inverses",
    "SpectralConv",
    "SpectralNorm",
    "avg_pool",
    "bce_with_logits",
    "fftn",
    "ifftn",
    "interpolate",
    "inv_ex",
    "irfftn",
    "max_pool",
    "narrow_copy",
    "narrowed_sizes",
    "rfftn",
    "spdiags",
    "spectral_norm",
]
