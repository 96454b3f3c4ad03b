"""The choice of a request's replica, based on where the request's prefix is cached and on the work queued before it."""
