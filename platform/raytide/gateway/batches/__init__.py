"""Batches of the OpenAI API: their objects, their store, and the gateway process that works on each."""
