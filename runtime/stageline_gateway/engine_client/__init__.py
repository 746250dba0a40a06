"""Engines over HTTP: one generation as a stream of events, and short questions."""
