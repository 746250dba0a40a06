"""The status that is written: counts, conditions, progress."""
