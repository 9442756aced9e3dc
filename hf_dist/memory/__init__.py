"""What a step keeps in memory: activations, the loss without copies of the logits, states on host or disk."""
