"""Which requests are admitted: keys and their limits, places, bodies and the memory they hold."""
