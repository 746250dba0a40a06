"""The planner computes the next step of a PipelineModel from its observed state. Pure: no client, no clock."""
