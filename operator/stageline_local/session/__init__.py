"""One `stageline up`: its objects, its reconcile loop, and its files for other processes."""
