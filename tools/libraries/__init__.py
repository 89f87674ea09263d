"""Training libraries under `gradmesh check`."""
