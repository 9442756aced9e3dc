"""How a layer or a model is divided: pipeline stages, tensors, sequences, experts, replicas."""
