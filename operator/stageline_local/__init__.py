"""One machine in place of a cluster: the operator's own plans, with pods run as local processes.

The process node takes the pod manifests that the operator would send to an API server and stands in for the kubelet:
same commands, env, probes, termination messages and statuses. A field that it can't honour is refused by its name.
Containers are known only by their processes, HTTP endpoints and exit codes.
"""
