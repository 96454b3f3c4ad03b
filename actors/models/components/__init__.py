"""Parts of an architecture that have their own configs: rotary embeddings and vision encoders."""
