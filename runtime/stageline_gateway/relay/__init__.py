"""The choices of a request on their groups, and on other groups when a group fails."""
