"""The group as the engine sees it: its stages, their handshake, their clocks and links."""
