"""`gradmesh demo forces`: graph parallelism for an interatomic potential, compared with one process.

`structures` makes the data with ASE, `batches` their graphs, `layers` the parts of the network. `single` is the
potential for one process and `parallel` for ranks; docs/forces.md shows the difference. `training` and `dynamics` run
it, `comparing` compares both, `job` runs everything and `report` shows the results.
"""
