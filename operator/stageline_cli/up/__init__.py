"""`stageline up` and `down`: one model in local mode, with its user interface."""
