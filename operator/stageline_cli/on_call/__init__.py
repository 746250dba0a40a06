"""What somebody on call asks of running models, in a terminal: the facts that the dashboards show, without Grafana.

`local_source` and `cluster_source` find objects and reach pods; `readings` asks the pods; `snapshot` makes facts of
both, purely; `status_view` and `top_view` draw facts, purely; `bundle` packs everything, and `redaction` takes secrets
out.
"""
