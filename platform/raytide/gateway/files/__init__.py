"""The files that clients upload through the OpenAI API: their storage, limits and expiry."""
