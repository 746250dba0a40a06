"""Stageline beside llama.cpp, which is what people run a small model with on one machine."""
