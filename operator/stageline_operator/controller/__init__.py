"""The operator process: watches a cluster, asks the planner for the next step, executes it.

Only this package imports kopf and a Kubernetes client. kopf watches and never writes: it adds no finalizer, annotation
or Event. All writes use one client. Every decision that the planner can make is made there.
"""
