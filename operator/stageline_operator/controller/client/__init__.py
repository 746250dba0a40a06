"""The kinds of objects that the operator uses, its rights to them, and writes with guards."""
