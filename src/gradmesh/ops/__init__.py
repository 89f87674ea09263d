"""The ops: one file for each, or for an op and its adjoint, with its rows of the registry at its end.

* base.py: what an op is, and the law it keeps.
* sizes.py: the sizes that ranks have along a dimension.
* row.py: what a row of the registry says.
* registry.py: the rows of all files, which tests and docs are made from.

An op moves bytes through a transport (`gradmesh.transport`). It is independent of backends and of autograd, which
applies it.
"""
