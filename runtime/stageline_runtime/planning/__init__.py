"""How a model is divided among stages. Pure: no torch, no I/O."""
