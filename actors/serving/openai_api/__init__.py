"""The OpenAI API: its wire types, their translation into engine requests, and the answers."""
