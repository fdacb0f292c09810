"""A view of your own for the page of `clearhead explore`: one route, and entropy.js beside this file."""

from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.responses import Response

from clearhead.predict import load
from clearhead.serve.app import create_app
from clearhead.serve.inspect import add_view
from clearhead.serve.inspect.explorer import Exploring, InspectRoute
from clearhead.serve.inspect.requests import Request

router = APIRouter(route_class=InspectRoute)


@router.post("/entropy")
async def entropy(body: Request, explorer: Exploring) -> Response:
    """Mean entropy of the attention of each head, in bits: (L, H)."""

    def work(explored: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        trace = explored.trace(body).trace
        kind = trace.kinds[-1]
        weights = [trace.at(kind, layer).heads_and_weights()[1] for layer in range(trace.depth(kind))]
        bits = [torch.special.entr(each).sum(-1).mean(-1) / torch.log(torch.tensor(2.0)) for each in weights]
        return {"kind": kind}, {"entropy": torch.stack(bits)}

    return await explorer.frame(body.model, work)


def app(*names: str) -> FastAPI:
    """The server of some models, with the view."""
    server = create_app({name: load(name) for name in names})
    add_view(server, Path(__file__).with_name("entropy.js"), router)
    return server


if __name__ == "__main__":
    uvicorn.run(app("en-de", "novels-gpt"), port=8765)
