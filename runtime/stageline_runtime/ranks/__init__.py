"""The rank processes of one stage: their exchanges within a step, and the part of the stage that each holds."""
