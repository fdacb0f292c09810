"""Tools for maintainers of the package."""
