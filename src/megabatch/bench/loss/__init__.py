"""A loss in one process: megabatch, its peers and the limit."""
