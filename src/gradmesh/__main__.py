"""`python -m gradmesh` is the command line."""

from gradmesh.cli import main

main()
