"""Facts shown in a terminal."""
