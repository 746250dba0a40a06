"""Builds the boards of `stageline_dashboards` with grafana-foundation-sdk, from the names that exporters register.

They use Grafana's classic format, which Grafana 10 to 13 and its ConfigMap sidecar support. The SDK warns about modules
of older formats when they are first imported, which happens here.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import barchart, dashboard  # noqa: F401
