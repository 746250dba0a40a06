"""The command `stageline`. A subcommand is imported only when it runs, so help needs neither torch nor a network."""
