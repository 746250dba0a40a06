"""What the engine and the stages say to each other, and the TCP connection that carries it. Free of torch."""
