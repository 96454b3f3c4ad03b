"""Files of the OpenAI API: their store, limits and expiry."""
