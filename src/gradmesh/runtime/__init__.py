"""What a rank knows: its state, its mesh of axes, and the level at which its calls are checked."""
