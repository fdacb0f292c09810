"""Files to batches: formats, cleaning, tasks, the token cache, the batch order, the loader."""

from clearhead.data.batch import Batch
from clearhead.data.batch_order import Position
from clearhead.data.build_datasets import Data, from_records, open_dataset, prepare
from clearhead.data.dataset import Dataset
from clearhead.data.loader import GlobalBatch, Loader
from clearhead.ops.cross_entropy import IGNORED

__all__ = [
    "IGNORED",
    "Batch",
    "Data",
    "Dataset",
    "GlobalBatch",
    "Loader",
    "Position",
    "from_records",
    "open_dataset",
    "prepare",
]
