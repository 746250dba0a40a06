"""What `stageline up --monitor` adds: a Prometheus of its own with the shipped rules, and a page that draws the boards.

`scrape` makes Prometheus' configuration, `prometheus` runs it as a child process, `board_server` serves the page, and
`monitor` holds all of them for one session, with the metrics that the operator would export in a cluster. `watcher` has
the hooks by which a session reports. Everything listens on loopback and ends with the session.
"""
