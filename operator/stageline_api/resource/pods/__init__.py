"""The pods of the stages: `spec.template`, `spec.stages[]`, and the pod fields that users can't set."""
