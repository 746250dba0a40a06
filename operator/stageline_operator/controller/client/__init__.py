"""The kinds of objects that the operator uses, its RBAC rules for them, and guarded writes."""
