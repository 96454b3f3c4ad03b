"""Images in: their pixels as a vision tower wants them, and the features that stand for them in a prompt."""
