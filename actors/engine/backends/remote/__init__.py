"""An engine in another process, and its protocol over a socket. Routers and a replica's supervisor use the engine this
way.
"""
