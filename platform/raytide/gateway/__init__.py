"""The OpenAI address of a cluster: `model` chooses the endpoint, whose replicas are reached over their own sockets."""
