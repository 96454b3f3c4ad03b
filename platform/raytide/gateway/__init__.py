"""The gateway: the OpenAI-compatible address of the whole cluster. `model` in a request names the endpoint. The gateway
reaches the endpoint's replicas over the replicas' own sockets."""
