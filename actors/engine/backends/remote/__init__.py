"""The client and the server of an engine that runs in another process, and their protocol over a socket. Routers use
such engines, and so does a replica's supervisor.
"""
