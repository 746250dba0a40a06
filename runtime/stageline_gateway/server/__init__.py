"""The HTTP server: sockets, TLS, connections, and the forms of responses."""
