"""GGUF, llama.cpp's file format: weights in blocks, the architecture and the tokenizer in one file."""
