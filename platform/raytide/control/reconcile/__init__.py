"""One tick of the controller: observe, decide, record intents, apply."""
