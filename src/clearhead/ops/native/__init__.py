"""The optional native C library for the CPU."""
