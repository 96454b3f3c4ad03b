"""A sweep runs variants of one stage. Variants with bad results end early."""
