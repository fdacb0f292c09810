"""One rank of test_parallel.py, on gloo: train and save with DDP and FSDP2, and load every checkpoint into both.

RUN/KIND is the checkpoint saved by KIND, RUN/KIND-TARGET the one saved by TARGET after loading it.

python parallel_worker.py RUN RANK
"""

import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from clearhead.checkpoint import gather_state, load_state, newest_checkpoint, write_checkpoint
from clearhead.model import Network
from tests.checkpoint.small_models import CONFIG, adam, network
from tests.strategies import tokens

KINDS = ("ddp", "fsdp")
UNEVEN = CONFIG.model_copy(update={"dim": 10, "head_dim": 6, "ff_dim": 13})  # odd dimensions make uneven shards


def wrap(kind: str, seed: int) -> tuple[Network, torch.nn.Module]:
    """Return the unwrapped network and its wrapper."""
    model = network(seed, UNEVEN)
    if kind == "ddp":
        return model, DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh)
    return model, fully_shard(model, mesh=mesh)


def save(run: Path, model: Network, optimizer: torch.optim.Optimizer, rank: int) -> None:
    weights, moments = gather_state(model, optimizer)
    if rank == 0:
        write_checkpoint(run, 2, weights, moments, {}, keep=1)
    else:
        assert not weights
        assert not moments
    distributed.barrier()


def main(run: Path, rank: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{run}/meet", rank=rank, world_size=2)
    for kind in KINDS:
        model, wrapped = wrap(kind, seed=0)
        optimizer = adam(model)
        for step in range(2):
            torch.manual_seed(2 * step + rank)
            optimizer.zero_grad()
            wrapped(tokens(2, 5)).square().mean().backward()
            optimizer.step()
        save(run / kind, model, optimizer, rank)
    for kind in ("single", *KINDS):
        state, _ = newest_checkpoint(run / kind)
        assert state is not None
        for target in KINDS:
            model, _ = wrap(target, seed=9)
            optimizer = adam(model)
            load_state(model, optimizer, state.weights(), state.optimizer())
            save(run / f"{kind}-{target}", model, optimizer, rank)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
