"""Every planted fault."""

from __future__ import annotations

from tests.mutants import of_ends, of_messages, of_parallelism, of_products, of_sharding, of_steps, of_storage
from tests.mutants.mutant import Mutant

MUTANTS: list[Mutant] = [
    *of_sharding.MUTANTS,
    *of_steps.MUTANTS,
    *of_parallelism.MUTANTS,
    *of_storage.MUTANTS,
    *of_ends.MUTANTS,
    *of_messages.MUTANTS,
    *of_products.MUTANTS,
]
