"""Fields that several requests have, and what they ask for: constraints of the output, prompts that are cut."""
