"""Makes the boards of `stageline_dashboards` with grafana-foundation-sdk, from the names that exporters register.

They are of Grafana's classic kind, which every Grafana from 10 to 13 and its sidecar for ConfigMaps understand. The SDK
would rather have everybody make its newest kind, and says so when its modules of the others are first imported: here.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import barchart, dashboard  # noqa: F401
