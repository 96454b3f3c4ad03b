"""The ASGI application of a server, and the handling that every request gets, whatever its route."""
