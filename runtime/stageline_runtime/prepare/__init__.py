"""`stageline prepare`: turns a model source into a complete Hugging Face directory in the model cache.

A source is fetched and converted at most once per cache; an entry is published by an atomic rename, so a reader sees
all of it or nothing. `location` alone says where an entry lives and may be imported by the torch-free engine.
"""
