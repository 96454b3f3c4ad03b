"""The choice of a request's replica: where its prefix is cached, and how much work is in front of it there."""
