"""Every layer of `gradmesh.nn` beside its dense counterpart: values, derivatives, modes and memory in one table."""
