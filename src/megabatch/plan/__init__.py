"""`megabatch plan`: what fits, how long a step takes and what limits it, predicted before anything is run."""
