"""What attention over a cut sequence takes on each rank, in memory and time, and beside other ways to have it."""
