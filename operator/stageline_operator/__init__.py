"""The control plane: what should exist for a PipelineModel, and the process that brings it about.

`planner` is pure: a model, what was observed, the time and a random token go in; objects, deletions and a status come
out. `controller` is the operator process around it, and alone talks to an API server.
"""
