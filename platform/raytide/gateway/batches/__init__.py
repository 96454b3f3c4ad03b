"""Batches of the OpenAI API: what a batch is, who keeps it, and which gateway process works on it."""
