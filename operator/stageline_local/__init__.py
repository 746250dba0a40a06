"""Local mode: one machine instead of a cluster, with the operator's own planner and pods as local processes.

The process node replaces the kubelet. It gets the pod manifests that the operator would send to an API server, and uses
the same commands, env, probes, termination messages and statuses. It refuses unsupported fields by name. It knows
containers only by their processes, HTTP endpoints and exit codes.
"""
