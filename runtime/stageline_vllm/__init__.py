"""vLLM as the engine of a PipelineModel: each stage is one node of vLLM's own pipeline, under our supervisor."""
