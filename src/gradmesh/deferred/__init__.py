"""Deferred gradient reductions for gradient accumulation: `gradmesh.no_sync`."""
