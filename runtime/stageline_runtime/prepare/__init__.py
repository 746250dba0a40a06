"""`stageline prepare`: turns a model source into a Hugging Face directory in the model cache.

A source is fetched and converted at most once per cache; an entry is published by an atomic rename, so a reader sees
all of it or nothing. Weights in shards are the exception: each is published separately once a stage needs it
(`shards`). Only `cache` knows where an entry is and which files it lacks. The torch-free engine may import it.
"""
