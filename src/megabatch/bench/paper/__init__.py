"""The tables of the paper, made again at this machine's scale."""
