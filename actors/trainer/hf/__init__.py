"""Loading and exporting Hugging Face model directories: weights, adapters, tokenizers."""
