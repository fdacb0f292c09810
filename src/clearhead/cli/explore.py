"""`clearhead explore`: a local page that shows what happens inside models."""

from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.options import Device, Dtype
from clearhead.cli.output import echo
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.predict import Model

DEFAULT_MODELS = ("en-de", "novels-gpt", "novels-bert", "zh-en")  # one of each family, and Chinese


def explore(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL…]", help="Models to show; by default those of the package."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes any free one.")] = 8765,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Open a page that shows what happens inside models: attention, every step of a head, beams, ablation.

    Of a run folder, its checkpoints are shown, too.

    Example: clearhead explore
    Example: clearhead explore runs/my-translator en-de --port 9000
    """
    try:
        from clearhead.cli.serve import load_models, served_names
        from clearhead.config.serve import ServeConfig
        from clearhead.serve.app import create_app
        from clearhead.serve.inspect.checkpoints import checkpoint_models
        from clearhead.serve.server import bind, run
    except ModuleNotFoundError as error:
        raise UserError(f"explore needs {error.name}; run: pip install 'clearhead[serve]'") from None

    config = ServeConfig.build({"port": port})
    names = served_names(list(models or DEFAULT_MODELS))
    listener = bind(config)
    loaded: dict[str, Model] = {}
    for name, model in load_models(names, device, dtype).items():
        loaded |= {name: model, **checkpoint_models(names[name], model, name)}
    app = create_app(loaded, config)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    echo(f"{', '.join(names)}: {address} (Ctrl-C stops)", err=True)
    if browser:
        import threading
        import webbrowser

        threading.Timer(0.3, webbrowser.open, [address]).start()
    run(app, listener, config)
