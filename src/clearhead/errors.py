"""Errors for the user: the command line shows them without a traceback and exits with code 2."""


class UserError(ValueError):
    """A mistake in the user's input: `path or key: what is wrong; how to fix it`."""


class ConfigError(UserError):
    """Unknown, mistyped, out-of-range or contradictory settings, one line each."""
