"""OpenMP settings for a CPU: threads that wait for others sleep at once, so that a busy machine does not stall them."""

import os

USER_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # environment variables


def wait_passively() -> bool:
    """Let libgomp's threads sleep at barriers instead of spinning; return False if the user has set how they wait.

    A thread that spins on the core that another one needs keeps that one from arriving. libgomp reads the variable when
    it is loaded, which `import torch` does.
    """
    if any(name in os.environ for name in USER_SETTINGS):
        return False
    os.environ["GOMP_SPINCOUNT"] = "0"
    return True
