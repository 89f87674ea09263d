"""What the tapes, run again, say of the program: the findings."""
