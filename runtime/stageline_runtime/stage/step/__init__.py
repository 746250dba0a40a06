"""One step of a stage: inputs, layers, sampling, and what is handed on."""
