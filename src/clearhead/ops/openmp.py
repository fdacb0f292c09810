"""OpenMP settings for training on a CPU: threads that wait soon sleep, so that a busy machine does not stall them."""

import os

USER_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # environment variables
SPIN_COUNT = 1000  # libgomp's default is 300,000; docs/log.md has the speed with others


def spin_briefly() -> bool:
    """Let libgomp's threads sleep after a short spin at barriers; return False if the user has set how they wait.

    A thread that spins on the core that another one needs keeps that one from arriving. libgomp reads the variable when
    it is loaded, which `import torch` does. Inference keeps the default, since it loses up to 8% on an idle machine.
    """
    if any(name in os.environ for name in USER_SETTINGS):
        return False
    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    return True
