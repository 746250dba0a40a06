"""A real group of processes on chosen cores, what it is asked, and how a round is run."""
