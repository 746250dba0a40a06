"""What an on-call person sees: Grafana boards (`boards/*.json`, generated) and Prometheus rules (`rules/*.yaml`)."""
