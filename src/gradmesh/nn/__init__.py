"""What people build with the verbs.

* `gm.nn.graph`: networks on a graph that is cut over the ranks of an axis.
* `gm.nn.fields`: fields that are cut over ranks along their rows; `HaloConv1d` and its like, `SpectralConv`.
"""

from gradmesh.nn import fields, graph
from gradmesh.nn.fields import (
    HaloAvgPool,
    HaloConv1d,
    HaloConv2d,
    HaloConv3d,
    HaloConvTranspose1d,
    HaloConvTranspose2d,
    HaloConvTranspose3d,
    HaloMaxPool,
    SpectralConv,
)

__all__ = [
    "HaloAvgPool",
    "HaloConv1d",
    "HaloConv2d",
    "HaloConv3d",
    "HaloConvTranspose1d",
    "HaloConvTranspose2d",
    "HaloConvTranspose3d",
    "HaloMaxPool",
    "SpectralConv",
    "fields",
    "graph",
]
