"""The engine process: requests in, plans out, tokens back. Free of torch, by contract.

Pure inside (`scheduling`, most of `text`), asyncio around it (`core`, `group`, `edge`).
"""
