"""Who may come in: keys, limits, bodies and the memory they hold."""
