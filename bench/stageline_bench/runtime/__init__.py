"""Benchmarks of the runtime: real groups, pinned to cores, measured in interleaved rounds. Never part of a test."""
