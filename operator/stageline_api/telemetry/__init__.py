"""The form of metrics, spans and timelines, alike for every component."""
