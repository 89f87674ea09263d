"""Checks of the verbs' arguments: each returns the argument in its plain form or raises the library's own error."""

from gradmesh.arguments.call import Call, SizesLike
from gradmesh.arguments.plain import explained, integer

__all__ = ["Call", "SizesLike", "explained", "integer"]
