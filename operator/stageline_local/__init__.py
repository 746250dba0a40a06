"""One machine in place of a cluster: the operator's own plans, with pods run as local processes.

The process node takes the pod manifests that the operator would send to an API server and stands in for the kubelet:
same commands, env, probes, termination messages and statuses. What it can't honour it refuses by name. It knows the
containers only through their processes, their HTTP endpoints and their exit codes.
"""
