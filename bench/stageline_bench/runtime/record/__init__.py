"""What a round is counted by, kept as, and shown as on a page."""
