"""One optimizer step: the engine, how it is built, the gradients between two steps, what it saves."""
