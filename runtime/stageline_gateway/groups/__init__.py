"""Which groups there are, whether they take requests, and which one suits a request."""
