"""The bytes of memory that a training rank needs, by purpose."""
