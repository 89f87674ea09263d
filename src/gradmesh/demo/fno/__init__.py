"""The job behind `gradmesh demo fno`: a Fourier neural operator for Burgers' equation, its fields cut over ranks.

`burgers` solves the equation, `network` is the operator, dense and in parts, `job` trains both and compares, `report`
shows it.
"""
