"""The control plane's thinking: what should exist for a PipelineModel, and the next step towards it.

Planning is pure: a model, what was observed, the time and a random token go in; objects, deletions and a status come
out. Nothing here talks to an API server, reads a clock or remembers anything.
"""
