"""`clearhead serve`: one HTTP server for every model and task."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.options import Device, Dtype
from clearhead.cli.output import echo
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.config.serve import ServeConfig
    from clearhead.predict import Model


def serve(
    models: Annotated[list[str], typer.Argument(metavar="MODEL…", help="Models to serve; NAME=MODEL gives a name.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes any free one.")] = 8000,
    api_keys: Annotated[
        Path | None, typer.Option("--api-keys", help="File with one key per line; SIGHUP reads it again.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond this machine without API keys.")] = False,
    host_name: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Allow this name in the Host header.")
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="Let pages of this origin call the server.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with limits; its keys are those of ServeConfig.")
    ] = None,
    log_texts: Annotated[bool, typer.Option("--log-texts", help="Log prompts and outputs.")] = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Serve models over HTTP: OpenAI's and LibreTranslate's routes, and routes for every other task.

    Example: clearhead serve novels-gpt en-de novels-bert
    Example: clearhead serve chat=smollm2 --port 9000 --api-keys keys.txt
    """
    try:
        from clearhead.serve.app import create_app
        from clearhead.serve.keys import Keys
        from clearhead.serve.languages import translators
        from clearhead.serve.server import bind, check_address, run
    except ModuleNotFoundError as error:
        raise UserError(f"serve needs {error.name}; run: pip install 'clearhead[serve]'") from None

    given: dict[str, Any] = {"host": host, "port": port, "insecure": insecure, "log_texts": log_texts}
    given |= {"host_names": tuple(host_name or ()), "cors_origins": tuple(cors or ())}
    settings = _settings(config, given)
    keys = Keys.load(api_keys)
    check_address(settings, bool(keys))
    names = served_names(models)
    listener = bind(settings)  # before minutes of loading
    app = create_app(load_models(names, device, dtype), settings, keys)
    known = {each.served.name for each in translators(app.state.registry)}
    for name, served in app.state.registry.models.items():
        if "translate" in served.commands and name not in known:
            model = names[name]
            echo(
                f"{name}: /translate does not know its languages; serve it as en-de={model}, or whatever they are",
                err=True,
            )
    bound, bound_port = listener.getsockname()[:2]
    address = f"[{bound}]" if ":" in bound else bound
    _log_requests()
    echo(f"{', '.join(names)}: http://{address}:{bound_port} (documentation at /docs; Ctrl-C stops)", err=True)
    run(app, listener, settings)


def _log_requests() -> None:
    """Write the server's log to stderr."""
    import logging

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("clearhead.serve", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False
    logging.getLogger("clearhead.serve").setLevel(logging.INFO)


def _settings(file: Path | None, given: dict[str, Any]) -> "ServeConfig":
    """The settings of a file, and those of the command line that differ from their defaults."""
    from clearhead.config.load import read_yaml
    from clearhead.config.serve import ServeConfig
    from clearhead.files import read_text

    data = {} if file is None else read_yaml(read_text(file), str(file))
    for key in ("host_names", "cors_origins"):
        if isinstance(data.get(key), list):
            data[key] = tuple(data[key])
    changed = {key: value for key, value in given.items() if value != ServeConfig.model_fields[key].default}
    return ServeConfig.build({**data, **changed}, where="" if file is None else str(file))


def served_names(models: list[str]) -> dict[str, str]:
    """Models to load by the name under which they are served."""
    names: dict[str, str] = {}
    for given in models:
        name, equals, model = given.partition("=")
        if not equals:
            name, model = Path(given).name if Path(given).is_dir() else given, given
        if not name or not name.isprintable() or len(name) > 100:
            raise UserError(f"{given!r:.120}: no name to serve it under; write NAME=MODEL")
        if name in names:
            raise UserError(f"{name}: two models have this name; write NAME=MODEL for one of them")
        names[name] = model
    return names


def load_models(names: dict[str, str], device: str, dtype: str | None) -> "dict[str, Model]":
    """Load all models in parallel."""
    from concurrent.futures import ThreadPoolExecutor

    from clearhead.inference.engine import is_out_of_memory
    from clearhead.predict import load

    def load_one(name: str) -> "Model":
        try:
            model = load(names[name], device, dtype)
            _ = model.inference_network, model.tokenizers  # optimized now, not at the first request
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(f"{name}: not enough memory for this model; use --dtype int8, or serve fewer") from None
        echo(f"{name}: loaded", err=True)
        return model

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(load_one, names), strict=True))
