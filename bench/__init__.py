"""Benchmarks against peer libraries on the same work, side by side in one run; each prints its ratio to the peer."""
