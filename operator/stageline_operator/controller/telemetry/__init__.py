"""The operator's metrics, health endpoints and logs."""
