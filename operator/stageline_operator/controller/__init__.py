"""The operator process: watches a cluster, asks the planner for one step, carries it out.

This package is the operator's edge, and the only place that imports kopf and a Kubernetes client. kopf watches and
never writes: it adds no finalizer, no annotation and no Event. Everything that is written goes through one client.
Nothing is decided here that the planner could decide.
"""
