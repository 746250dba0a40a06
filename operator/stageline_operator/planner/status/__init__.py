"""The status to write: counts, conditions, progress."""
