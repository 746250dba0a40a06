"""Which rows run when, in which slots, with how much cache. Pure."""
