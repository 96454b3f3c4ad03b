"""The replicas behind the gateway: where they are, which one answers a request, and what happens when it is lost."""
