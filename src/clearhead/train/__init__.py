"""Batches to weights: losses, schedules, optimizers."""
