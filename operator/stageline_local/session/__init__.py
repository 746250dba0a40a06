"""One `stageline up`: its objects, its reconcile loop, and what others can read about it."""
