"""Captured steps: how a stage's layers are captured ahead of time and run in the mode that each plan names."""
