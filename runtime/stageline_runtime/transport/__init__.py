"""How hidden tensors and feedback cross between stages. The runner sees `protocol.Transport` and nothing below it."""
