"""Capacity of a model cache: which entries may be removed, by which process and when.

A cache used by one pod holds only the entries that this pod needs (`make_room.remove_others`). A cache shared by
several models evicts the longest unused entries, if it has a limit (`make_room`), and never one in use (`use`).
"""
