"""Argument checks of the verbs."""

from gradmesh.arguments.call import Call, SizesLike
from gradmesh.arguments.plain import integer, verb

__all__ = ["Call", "SizesLike", "integer", "verb"]
