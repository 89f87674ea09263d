"""Draw what each rank holds before and after every verb, forward and backward: python -m tools.pictures."""
