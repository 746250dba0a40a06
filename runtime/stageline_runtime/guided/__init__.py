"""Guided decoding: output that a grammar admits, checked by the engine and enforced by the last stage."""
