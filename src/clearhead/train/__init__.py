"""Training: loop, losses, schedules, optimizers, distributed, run log."""
