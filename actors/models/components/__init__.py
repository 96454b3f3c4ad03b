"""Parts of an architecture that have their own configs: rotary embeddings, vision towers."""
