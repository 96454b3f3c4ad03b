"""Fields that several request types share: constraints on the output, and truncation of prompts."""
