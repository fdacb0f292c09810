"""The language of the command line: CLEARHEAD_LANG, else the locale; English needs no catalog."""

import os
import sys
from functools import cache

LOCALE_VARIABLES = ("LC_ALL", "LC_MESSAGES", "LANG")  # the first that is set counts, as in gettext
LANGUAGES = {"zh": "中文"}  # with a catalog, locale/LANGUAGE.po, and their own names


@cache
def language() -> str:
    """Return the language of messages, like en or zh; en where there is no catalog or the terminal cannot show it."""
    chosen = os.environ.get("CLEARHEAD_LANG") or next(filter(None, map(os.environ.get, LOCALE_VARIABLES)), "")
    code = chosen[:2].lower()
    return code if code in LANGUAGES and _can_show(LANGUAGES[code]) else "en"


def _can_show(text: str) -> bool:
    try:
        text.encode(getattr(sys.stderr, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def localized(text: str) -> str:
    """Return a message in the language of the user; what the catalog does not have stays English."""
    if language() == "en":
        return text
    from clearhead.cli.catalog import load_catalog

    return load_catalog(language()).translate(text)
