"""`status`, `top` and `debug-bundle`: in a terminal, what the dashboards show of running models, without Grafana.

`sources` find objects and reach pods; `facts.scrape` asks the pods; `facts.snapshot` makes facts of both (pure);
`views` draw facts (pure); `bundle` packs everything, with secrets taken out by `redaction`.
"""
