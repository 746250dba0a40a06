"""Manifests with status, read once into the facts that planning needs."""
