"""The archive of `stageline debug-bundle`: what goes into it, and what is taken out of it first."""
