"""One stage's process: load a range of layers, run plans in order, account for every second."""
