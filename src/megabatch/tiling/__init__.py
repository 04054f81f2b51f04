"""How the plane of logits is walked: the plan, the walk, and the operators that are the one seam to autograd."""
