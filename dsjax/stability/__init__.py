"""What a run does when numbers go wrong."""
