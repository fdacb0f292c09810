"""One file for each experiment; its module-level EXPERIMENT is found by `lab.registry`."""
