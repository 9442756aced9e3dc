"""Storage of 1-D tensors between uses: on the device, in host memory or on disk. Knows nothing of models or ZeRO."""
