"""The engine's HTTP interface: routes, bodies, the streamed answer."""
