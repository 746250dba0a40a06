"""Stages that Hugging Face's own layers compute."""
