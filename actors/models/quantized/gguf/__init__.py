"""GGUF, llama.cpp's file format. One file has the architecture, the tokenizer, and the weights, which are divided into
blocks.
"""
