"""Optimizers on fragments, gradient norm and clipping, loss scaling, DeepSpeed's schedules."""
