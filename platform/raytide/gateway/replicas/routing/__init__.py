"""The choice of a request's replica, by where the request's prefix is cached and how much work is queued before it."""
