"""Short versions of the fault campaigns of `tests.serve.torture`: what leaks fails; times are not asserted here."""

import pytest

from clearhead.predict import Model
from tests.serve import torture


def test_closed_connections_free_their_rows_in_every_phase(packaged: dict[str, Model]) -> None:
    torture.disconnects({name: packaged[name] for name in ("novels-gpt", "en-de")}, 2 * len(torture.PHASES))


def test_slow_readers_are_dropped(packaged: dict[str, Model]) -> None:
    torture.slow_readers(packaged, 4, rounds=1)


def test_silent_connections_are_closed(packaged: dict[str, Model]) -> None:
    torture.half_open(packaged, 8)


def test_failed_engines_come_back(packaged: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.serve.registry.FIRST_BACKOFF", 0.5)
    torture.crashes({name: packaged[name] for name in ("novels-gpt", "en-de")}, 1)


def test_an_overloaded_server_refuses_and_finishes_what_it_admitted() -> None:
    torture.overload(20, 1.0, tokens=128)


def test_mixed_load_leaves_nothing_behind() -> None:
    torture.mixed(3, 1, clients=4)
