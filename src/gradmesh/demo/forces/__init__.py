"""The job behind `gradmesh demo forces`: a potential for atoms, trained and run on one process and on ranks.

`structures` makes the data with ASE, `batches` their graphs, `layers` the parts of the network. `single` is the
potential as it is written for one process and `parallel` the same on ranks; docs/forces.md shows what differs.
`training` and `dynamics` run it, `comparing` holds both against each other, and `report` shows what `job` finds.
"""
