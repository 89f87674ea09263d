"""Scripts for those who work on gradmesh."""
