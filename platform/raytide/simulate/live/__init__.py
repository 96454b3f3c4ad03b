"""A replay of a live cluster: what it would have decided under other settings."""
