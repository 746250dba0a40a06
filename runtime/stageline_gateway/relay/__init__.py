"""A request on its group, and on another one when that fails it."""
