"""Files to batches: formats, cleaning, tasks, the token cache, the order of samples, the loader."""

from clearhead.data.batch import Batch
from clearhead.data.dataset import Dataset
from clearhead.data.loader import GlobalBatch, Loader
from clearhead.data.order import Position
from clearhead.data.prepare import Data, from_records, open_set, prepare
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
    "open_set",
    "prepare",
]
