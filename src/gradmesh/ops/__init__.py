"""The ops: one file for each, or for an op and its adjoint, with its rows of the registry at its end.

* transport.py: the ranks of an axis, and the primitives that ops are made of.
* base.py: what an op is, and the law it keeps.
* sizes.py: the sizes that ranks have along a dimension.
* row.py: what a row of the registry says.
* registry.py: the rows of all files, which tests and docs are made from.

An op moves data through the transport that is handed to it. This package imports torch, and of gradmesh only the types,
the errors and two helpers: backends, checks and autograd are above it, and `gradmesh.transport.run` runs an op.
"""
