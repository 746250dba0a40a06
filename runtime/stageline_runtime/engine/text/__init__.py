"""Between text and token ids: templates, tokenizer, detokenizer, stop strings."""
