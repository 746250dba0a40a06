"""Fetch the model of a PipelineModel into the cache that `stageline up` uses by default: `python fetch_model.py FILE`.

It needs no more than the extra `prepare`, so it runs while the rest is installed.
"""

import sys
from pathlib import Path

from stageline_api.manifests.manifest_loader import load_one_model
from stageline_cli.main import main
from stageline_local.session.instance import default_cache_dir

if __name__ == "__main__":
    spec = load_one_model(Path(sys.argv[1])).spec
    cache = spec.model.cache.host_path or str(default_cache_dir())
    sys.argv = [
        "stageline",
        "prepare",
        "--source",
        spec.model.source,
        "--cache-dir",
        cache,
        "--engine",
        spec.engine.name,
    ]
    main()
