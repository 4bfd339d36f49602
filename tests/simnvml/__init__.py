"""A simulated libnvidia-ml.so.1 that answers from a state file; see README.md for what it proves and what not."""
