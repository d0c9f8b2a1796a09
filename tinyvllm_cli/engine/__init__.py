"""Which tokens run when: sequences, cache blocks, the scheduler and the engine. Standard library and numpy only."""
