"""Training: settings and recipes, the training loop, checkpoints, comparisons and their reports."""
