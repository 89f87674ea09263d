"""`gradmesh demo fno`: a Fourier neural operator for Burgers' equation, with domain decomposition.

`burgers` solves the equation, `network` is the operator (dense and sharded), `job` trains both and compares, `report`
shows the results.
"""
