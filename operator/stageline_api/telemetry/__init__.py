"""The form of metrics, spans, timelines and logs, alike for every component."""
