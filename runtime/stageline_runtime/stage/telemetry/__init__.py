"""What a stage tells about itself: its state clock, timeline, metrics and health."""
