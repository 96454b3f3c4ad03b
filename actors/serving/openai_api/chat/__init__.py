"""The parts of chats other than text: images in the messages, and tools to call."""
