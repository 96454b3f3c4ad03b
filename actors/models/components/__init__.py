"""Parts of an architecture with configs of their own: rotary embeddings, vision towers."""
