"""Manifest files and types: loads and validates manifests, and writes the CRD and its field reference."""
