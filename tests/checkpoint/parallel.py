"""What each of two processes does in the parallel test, on gloo: train and save under DDP and FSDP2, and load each
state into both; RUN/KIND is what was saved, RUN/KIND-OTHER what OTHER holds after loading it.

python parallel.py RUN RANK
"""

import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from clearhead.checkpoint import gather, newest_state, save_state, scatter
from clearhead.model import Network
from tests.checkpoint.small import CONFIG, adam, network
from tests.strategies import tokens

KINDS = ("ddp", "fsdp")
WIDE = CONFIG.model_copy(update={"dim": 10, "head_dim": 6, "ff_dim": 13})  # odd sizes: uneven shards


def parallel(kind: str, seed: int) -> tuple[Network, torch.nn.Module]:
    """A bare network, and what is called to train it."""
    made = network(seed, WIDE)
    if kind == "ddp":
        return made, DistributedDataParallel(made)
    mesh = init_device_mesh("cpu", (2,))
    for layer in made.decoder.layers:
        fully_shard(layer, mesh=mesh)
    return made, fully_shard(made, mesh=mesh)


def save(run: Path, made: Network, optimizer: torch.optim.Optimizer, rank: int) -> None:
    weights, moments = gather(made, optimizer)
    if rank == 0:
        save_state(run, 2, weights, moments, {}, keep=1)
    else:
        assert not weights
        assert not moments
    distributed.barrier()


def main(run: Path, rank: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{run}/meet", rank=rank, world_size=2)
    for kind in KINDS:
        made, called = parallel(kind, seed=0)
        optimizer = adam(made)
        for step in range(2):
            torch.manual_seed(2 * step + rank)
            optimizer.zero_grad()
            called(tokens(2, 5)).square().mean().backward()
            optimizer.step()
        save(run / kind, made, optimizer, rank)
    for kind in ("single", *KINDS):
        state, _ = newest_state(run / kind)
        assert state is not None
        for other in KINDS:
            made, _ = parallel(other, seed=9)
            optimizer = adam(made)
            scatter(made, optimizer, state.weights(), state.optimizer())
            save(run / f"{kind}-{other}", made, optimizer, rank)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
