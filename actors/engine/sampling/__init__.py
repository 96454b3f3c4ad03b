"""The choice of the next token from logits: penalties, masks, filters, draws, log probabilities."""
