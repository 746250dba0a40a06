"""The planner: from a PipelineModel and what is observed of it to the one next step. Pure: no client, no clock."""
