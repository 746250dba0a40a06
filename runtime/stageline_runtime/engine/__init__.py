"""The engine process: requests in, plans out, tokens back. Free of torch, by contract.

Pure inside (`scheduler`, `slots`, `sizing`), asyncio at the edge (`core`, `group`, `server`).
"""
