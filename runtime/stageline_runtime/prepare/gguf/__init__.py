"""A GGUF file as a Hugging Face directory."""
