"""The API server as the operator uses it: access, kinds, reads, guarded writes."""
