"""Functions with a PyTorch reference and faster backends behind one dispatch each."""
