"""What chats have beside texts: images in, and tools to call."""
