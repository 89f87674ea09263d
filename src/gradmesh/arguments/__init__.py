"""Argument checks of the verbs."""

from gradmesh.arguments.call import Call, SizesLike
from gradmesh.arguments.plain import explained, integer

__all__ = ["Call", "SizesLike", "explained", "integer"]
