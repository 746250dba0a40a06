"""The data plane: an engine process and one process per stage that together run a model as a pipeline.

The engine plans, the stages run plans in order; every send, receive and collective is a pure function of the plan.
torch is imported by stages and by model preparation only, never by the engine.
"""
