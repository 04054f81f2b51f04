"""How one tile is computed. A backend folds a tile into its rows' statistics and pushes it into their gradients."""
