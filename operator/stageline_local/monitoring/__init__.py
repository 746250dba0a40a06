"""`stageline up --monitor`: a local Prometheus with the shipped rules, and a web page with the boards.

`scrape` creates Prometheus' configuration, `prometheus` runs it as a child process, and `board_server` serves the page.
`monitor` holds all of them for one session, and exposes the metrics that the operator exports in a cluster. `watcher`
has the hooks by which a session reports. Everything listens on loopback and ends with the session.
"""
