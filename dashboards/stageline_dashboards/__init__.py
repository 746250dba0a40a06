"""Monitoring: Grafana boards (`boards/*.json`, generated) and Prometheus rules (`rules/*.yaml`)."""
