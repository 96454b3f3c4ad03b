"""An engine in another process: its protocol over a socket, for routers and for a replica's own supervisor."""
