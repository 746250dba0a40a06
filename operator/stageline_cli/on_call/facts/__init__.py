"""Turns objects and scrapes into the facts of one moment."""
