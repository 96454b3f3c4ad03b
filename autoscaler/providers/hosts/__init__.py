"""Own machines as nodes, reached over ssh."""
