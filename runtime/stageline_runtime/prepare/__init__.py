"""`stageline prepare`: turns a model source into a Hugging Face directory in the model cache.

A source is fetched and converted at most once per cache; an entry is published by an atomic rename, so a reader sees
all of it or nothing. Weights in shards are the exception: each is published by itself once a stage needs it (`shards`).
`cache` alone says where an entry lives and what it lacks, and may be imported by the torch-free engine.
"""
