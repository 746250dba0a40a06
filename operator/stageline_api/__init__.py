"""The contract between Stageline's parts: resource types, names, ports, messages over HTTP, exit codes.

Everything two processes must agree on is said here once. This package depends on pydantic and PyYAML alone; it does
no I/O beyond reading files it is handed and writing what is generated from its types, and never imports torch, kopf, a
Kubernetes client or a network library.
"""
