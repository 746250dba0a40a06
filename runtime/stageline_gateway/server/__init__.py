"""The HTTP server: sockets, TLS, connections, and the form of what goes over them."""
