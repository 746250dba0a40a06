"""One step of a stage: inputs, layers, sampling, and outputs."""
