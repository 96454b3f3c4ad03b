"""The ASGI application of a server, and the handling of requests and responses that all routes share."""
