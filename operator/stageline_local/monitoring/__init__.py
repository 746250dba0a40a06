"""What `stageline up --monitor` adds: a Prometheus of its own with the shipped rules, and a page that draws the boards.

`scrape` and `drill` are pure; `prometheus` is the child process, `board_server` the page, `operator_series` the metrics
that the operator would export in a cluster, `monitor` all of them for one session. Everything listens on loopback and
ends with the session.
"""
