"""Scripts that write parts of README and docs/."""
