"""What makers of the package use, and users do not need."""
