"""The routes that answer each input with one vector or number: embeddings, scores and rankings."""
