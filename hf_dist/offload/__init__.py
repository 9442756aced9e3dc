"""Where 1-D tensors rest between uses: on the device, in host memory, on disk. Knows nothing of models or ZeRO."""
