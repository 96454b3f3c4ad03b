"""The gateway: the cluster's OpenAI address. `model` in a request names the endpoint, whose replicas are reached over
their own sockets.
"""
