"""The format of metrics, spans, timelines and logs, the same for every component."""
