"""The routes whose answer is one vector or number for each input: embeddings, scores, ranks."""
