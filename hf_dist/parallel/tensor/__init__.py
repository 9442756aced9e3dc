"""Matrix products split over ranks: own slices of plain parameters, and explicit crossings between states of activations."""
