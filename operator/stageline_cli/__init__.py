"""The command `stageline`. A subcommand is imported when it is invoked, so help needs neither torch nor a network."""
