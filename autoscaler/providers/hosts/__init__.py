"""The operator's own machines as nodes, reached over ssh."""
