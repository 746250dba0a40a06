"""The rank processes of one stage: what they exchange within a step, and whose part of it each holds."""
