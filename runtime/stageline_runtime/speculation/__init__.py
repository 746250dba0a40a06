"""Drafts for verifying rows: where they come from, how many, and whether they pay. Pure, and free of torch."""
