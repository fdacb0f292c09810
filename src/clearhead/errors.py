"""What a user did wrong, said to the user: shown as one line without a traceback, exit code 2."""


class UserError(ValueError):
    """A mistake in what the user gave: what was wrong, where (file, line, key), and what to do."""


class ConfigError(UserError):
    """A setting that is unknown, of the wrong type, out of bounds or at odds with another; one line for each."""
