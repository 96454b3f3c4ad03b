"""GGUF, llama.cpp's file format. One file has the weights in blocks, the architecture and the tokenizer."""
