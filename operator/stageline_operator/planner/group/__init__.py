"""One group: its next step, its failures and their cause, its restarts."""
