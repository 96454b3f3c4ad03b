"""GGUF, llama.cpp's file format. One file contains the architecture, the tokenizer and the weights. The weights are
divided into blocks.
"""
