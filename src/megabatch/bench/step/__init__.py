"""The whole of a training step, and the share of it that the loss takes."""
