"""Parses manifests with status into the facts that planning needs."""
