"""What a model's `config.json` and file headers say of it. Free of torch."""
