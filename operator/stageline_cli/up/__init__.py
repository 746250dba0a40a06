"""`stageline up` and `down`: one model served on this machine, as its user sees it."""
