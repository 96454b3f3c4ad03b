"""The ASGI application of a server and what it does with every request, whatever the route."""
