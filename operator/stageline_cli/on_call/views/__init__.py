"""Terminal output of facts."""
