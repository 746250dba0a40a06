"""Every benchmark, and the checks that only a GPU can make: never part of a test, loaded only when asked for."""
