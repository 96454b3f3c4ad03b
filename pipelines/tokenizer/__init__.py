"""Byte-level BPE tokenizers: training them, and the engines that encode with them."""
