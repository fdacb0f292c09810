"""`clearhead new`: write a recipe for data files, after guessing their task and columns."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.options import Force, check_new, utf8_path
from clearhead.cli.output import echo, say
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.data.guess_task import Guess


def new(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE", help="Table, JSON lines, CoNLL, text, folder, or FILE.en FILE.de."),
    ],
    out: Annotated[
        Path | None, typer.Option(callback=utf8_path, help="Recipe to write. Default: NAME.yaml in this folder.")
    ] = None,
    init_from: Annotated[
        str | None,
        typer.Option("--from", metavar="MODEL", help="Fine-tune this model instead of training from scratch."),
    ] = None,
    force: Force = False,
) -> None:
    """Guess the task and the columns of data files, print them, and write a commented recipe to train with.

    Example: clearhead new reviews.csv
    Example: clearhead new reviews.csv --from hf:distilbert/distilbert-base-uncased
    Example: clearhead new train.en train.de --out en-de.yaml
    """
    from clearhead.data.new_recipe import PLANS, recipe_name
    from clearhead.files import write_text

    target = out or Path(f"{recipe_name(files)}.yaml")
    check_new(target, force)
    guess, text = recipe_for(files, init_from)
    for reason in guess.reasons:
        say(reason)
    plan = PLANS[guess.task]
    say(f"model    {plan.preset}: {plan.comment}" if init_from is None else f"model    {init_from}")
    write_text(target, text)
    name = quote(target.as_posix())
    say(f"wrote    {name}; check it, then: clearhead train {name} --dry-run, and: clearhead train {name}")


def recipe_for(files: list[str], init_from: str | None = None) -> "tuple[Guess, str]":
    """Return what was guessed of data files, and a recipe that loads."""
    from clearhead.config.load import read_yaml
    from clearhead.config.recipe import Recipe
    from clearhead.data.guess_task import guess
    from clearhead.data.new_recipe import write_recipe

    guessed = guess(files)
    text = write_recipe(guessed, init_from)
    Recipe.build(read_yaml(text, "recipe"), where="recipe")
    return guessed, text


def recipe_of_data(name: str, init_from: str) -> str:
    """Return a recipe that fine-tunes a model on a data file, written here; a recipe is returned as it is."""
    from clearhead.checkpoint import model_folder_info
    from clearhead.config.data import is_data_file
    from clearhead.config.load import read_yaml
    from clearhead.config.recipe import recipe_names
    from clearhead.data.new_recipe import recipe_name
    from clearhead.files import read_text
    from clearhead.predict import find_model

    if name in recipe_names() or not is_data_file(name):
        return name
    target = Path(f"{recipe_name([name])}.yaml")
    model_folder_info(find_model(init_from))  # before a recipe with a wrong name is written
    if not target.exists():
        new([name], None, init_from, False)
        return target.as_posix()
    recipe = read_yaml(read_text(target), str(target))
    model, data = recipe.get("model"), recipe.get("data")
    train = data.get("train") if isinstance(data, dict) else None
    files = train.get("files", ()) if isinstance(train, dict) else ()
    if Path(name).absolute() not in [Path(str(file)).absolute() for file in files]:
        raise UserError(
            f"{target}, written earlier, is for other data than {name}; delete it, or write another recipe with: "
            f"clearhead new {quote(name)} --from {quote(init_from)} --out FILE.yaml"
        )
    known = model.get("init_from") if isinstance(model, dict) else None
    if known != init_from:
        start = "no init_from" if known is None else f"init_from {known}"
        raise UserError(
            f"--from: {target}, written earlier, has {start}, not {init_from}; "
            f"delete it, or train it with: clearhead train {quote(target.as_posix())}"
        )
    say(f"recipe   {target}, written earlier; delete it to write a new one for {name}")
    return target.as_posix()


def refuse_data_as_recipe(name: str) -> None:
    """Raise if data is given in place of a recipe, after printing a recipe for it."""
    from clearhead.config.data import is_data_file
    from clearhead.config.recipe import recipe_names
    from clearhead.data.new_recipe import recipe_name

    path = Path(name)
    if name in recipe_names() or not (is_data_file(name) or path.is_dir()):
        return
    if not path.exists():
        raise UserError(f"{name} does not exist; give a recipe, or write one for your data with `clearhead new FILE`")
    target = f"{recipe_name([name])}.yaml"
    echo(recipe_for([name])[1], end="")
    raise UserError(
        f"{name} is data, not a recipe; save the recipe above with: clearhead new {quote(name)}\n"
        f"then train with: clearhead train {target}"
    )
