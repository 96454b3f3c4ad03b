"""Batches of OpenAI's API: their objects, their store, and the work of a gateway process on a batch."""
