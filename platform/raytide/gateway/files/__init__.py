"""Files of the OpenAI API: who may keep which, where, and for how long."""
