"""What the page asks for: the bodies of /inspect requests, every number bounded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from clearhead.interpret.switches import Part, Switch
from clearhead.interpret.trace import Kind
from clearhead.limits import MAX_TEXT_CHARS

Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
Index = Annotated[int, Field(ge=0, lt=1 << 20)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 24)]


class Request(BaseModel):
    """A text of a model; `target` is what a translator's decoder reads, or an encoder's second text."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: Annotated[str, Field(max_length=4096)] = ""  # "" is the first one
    text: Text
    target: Text | None = None
    appended: Annotated[list[TokenId], Field(max_length=512)] = []  # after the text or the target, as chosen by a user


class LayerRequest(Request):
    """One layer with this kind of attention."""

    kind: Kind
    layer: Index = 0


class HeadRequest(LayerRequest):
    """One head."""

    head: Index = 0


class CellRequest(HeadRequest):
    """One number of one step of a head."""

    step: Literal["q", "k", "v", "rope_q", "rope_k", "scores", "scaled", "weights", "output", "update", "sum"]
    row: Index
    column: Index


class PositionRequest(Request):
    """The prediction at a position; the last one by default."""

    position: Index | None = None


class SwitchBody(BaseModel):
    """A part that is switched off."""

    model_config = ConfigDict(extra="forbid", strict=True)

    part: Part
    stack: Kind
    layer: Index = 0
    head: Index = 0

    def switch(self) -> Switch:
        """As `interpret` takes it."""
        return Switch(self.part, self.stack, self.layer, self.head)


class SwitchRequest(Request):
    """The output without some parts."""

    off: Annotated[list[SwitchBody], Field(max_length=4096)] = []


class EffectsRequest(Request):
    """The effect of every head, or of every other part, one at a time; of heads also those of one layer only."""

    group: Literal["heads", "parts"] = "heads"
    kind: Kind | None = None
    layer: Index | None = None


class BeamRequest(Request):
    """A beam search whose translations start with `prefix`."""

    beam: Annotated[int, Field(ge=1, le=16)] = 4
    length_penalty: Annotated[float, Field(ge=-10, le=10)] = 1.0
    steps: Annotated[int, Field(ge=1, le=256)] = 64
    prefix: Annotated[list[TokenId], Field(max_length=256)] = []


class NeighborsRequest(Request):
    """Tokens whose embeddings are nearest to that of a token."""

    side: Literal["source", "target"] = "target"
    position: Index
    count: Annotated[int, Field(ge=1, le=50)] = 8


class ContextRequest(Request):
    """One word in several contexts; the other texts are compared with `text`."""

    others: Annotated[list[Text], Field(max_length=16)]
    word: Annotated[str, Field(min_length=1, max_length=200)]
    layer: Index | None = None
