"""The contract between Stageline's parts: resource types, names, ports, messages over HTTP, exit codes.

Everything that two processes must agree on is defined here, once. This package depends only on pydantic and PyYAML. Its
only I/O is to read given files and to write the files generated from its types. It never imports torch, kopf, a
Kubernetes client or a network library.
"""
