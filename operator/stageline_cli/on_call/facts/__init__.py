"""From objects and scrapes to the facts of one moment."""
