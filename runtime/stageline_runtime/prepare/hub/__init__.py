"""`hf://` sources, through huggingface_hub."""
