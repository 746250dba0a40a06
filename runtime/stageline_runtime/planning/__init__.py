"""How a model is divided among stages, and what the machine offers them. Free of torch."""
