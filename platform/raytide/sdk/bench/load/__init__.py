"""A load on an endpoint: the requests, the generator that sends them, and the report on the responses."""
