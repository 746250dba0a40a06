"""What a model cache has room for: whose entries may be removed, by whom and when.

A cache that one pod alone uses keeps what that pod asks for (`make_room.remove_others`). From one that several models
share the longest unused entries go, once it has a limit (`make_room`), and never one that somebody reads (`use`).
"""
