"""Benchmarks, and checks that need a GPU: never part of a test, imported only on demand."""
