"""Train any Flax model sharded over a mesh of named axes."""
