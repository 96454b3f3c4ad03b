"""Text in and out: tokens, incremental decoding, stop strings, grammars."""
