"""Steps of large models at large world sizes on one process: fake tensors, a process group without other processes."""
