"""Figures of a round, result files, and pages."""
