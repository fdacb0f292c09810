"""One HTTP server for every model and task."""
