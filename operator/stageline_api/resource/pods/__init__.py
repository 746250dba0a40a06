"""What the stages' pods are made of: `spec.template`, `spec.stages[]`, and what of a pod is not a person's."""
