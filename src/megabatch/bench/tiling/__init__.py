"""What tiling costs: the stages of a step, each by its own time."""
