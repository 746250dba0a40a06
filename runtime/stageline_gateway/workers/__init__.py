"""A gateway of several processes: the supervisor that starts and watches them, and what they say to each other."""
