"""What the contrastive losses take in time and memory, and what more negatives bring."""
