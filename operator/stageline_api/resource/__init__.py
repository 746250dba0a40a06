"""The types of the PipelineModel: `metadata`, `spec`, `status`, and every default, bound and rule between fields."""
