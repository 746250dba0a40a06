"""The API server of Kubernetes as every part of Stageline uses it: where the login is, calls, errors.

`client` is for processes that run an event loop (the operator, the gateway); `reader` is for commands, which block.
Both send plain manifests and raise one `ApiError`. The `kubernetes` library logs in and opens connections; its models
of objects are not used. Only `places`, `errors` and `resources` can be imported where that library is not installed.
"""
