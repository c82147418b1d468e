"""The op in the stacks that people train with. Nothing here is imported unless it is asked for."""
