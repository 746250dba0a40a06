"""Mutual TLS between the pods of a model (`spec.network.tls`). Free of torch."""
