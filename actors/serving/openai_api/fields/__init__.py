"""Fields that several kinds of request share: constraints on the output, and truncation of prompts."""
