"""Stageline compared with llama.cpp, the usual engine for a small model on one machine."""
