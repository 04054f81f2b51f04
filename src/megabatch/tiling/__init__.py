"""How logits are computed tile by tile: layout, handshake, plan, engine, and operators, the one seam to autograd."""
