"""What gradients come out on several ranks, of ours and others' losses."""
