"""Logits tile by tile: layout, handshake, plan, engine, and the operators, the one seam to autograd."""
