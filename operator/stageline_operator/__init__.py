"""The control plane: decides which objects a PipelineModel needs, and creates them.

`planner` is pure: it computes objects, deletions and a status from a model, the observed state, the time and a random
token. `controller` is the operator process around it, and the only part that uses an API server.
"""
