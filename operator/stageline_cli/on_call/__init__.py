"""`status`, `top` and `debug-bundle`: the dashboards' content in a terminal, without Grafana.

`sources` find objects and reach pods; `facts.scrape` polls the pods; `facts.snapshot` turns both into facts (pure);
`views` render facts (pure); `bundle` packs everything, after `redaction` removes secrets.
"""
