"""The parts of chats beside texts: images in, and tools to call."""
