"""Batches to weights: losses, schedules, optimisers."""
