"""Which replica answers a request: where its prefix is cached, and how much work is in front of it there."""
