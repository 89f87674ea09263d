"""What a rank's program does, written down while it runs: operators, collectives, backwards, optimizer steps."""
