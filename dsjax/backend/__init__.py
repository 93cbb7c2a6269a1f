"""What depends on the backend that runs the compiled programs."""
