"""Several processes: which cluster this process belongs to, joining it, starting workers on a host."""
