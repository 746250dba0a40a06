"""Captured steps: which plans run captured, and how a stage's layers are captured. `mode` is free of torch."""
