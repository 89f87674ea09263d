"""Sums over ranks that backward owes to leaves, put off until the last micro-batch: `gradmesh.no_sync`."""
