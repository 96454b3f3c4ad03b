"""A load on an endpoint: its requests, the generator that sends them, and the report on the answers."""
