"""Training data without an index: read in lanes, resumed at the next row on any number of ranks that divides the lanes."""
